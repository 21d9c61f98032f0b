#!/bin/sh
# One shell for each WebSocket connection: a line in, what it prints out.
cd /root || exit 1
echo "conman session $CONMAN_SESSION_ID, generation $CONMAN_GENERATION"
while read -r line; do
    sh -c "$line" 2>&1
    echo "[exit $?]"
done
