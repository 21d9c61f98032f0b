//! Tests of the streams of all containers.

use std::io::{Read as _, Write as _};
use std::time::Duration;

use conman_shim_protocol::{
    Position, StreamEvent,
    socket::{receive_event, send_input},
};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::*;

/// Serves what is ready, as the loop does.
fn serve(table: &mut StreamTable) {
    let mut fds = [PollFd::new(table, PollFlags::IN)];
    poll(&mut fds, None).expect("an event");
    ContainerStreams::serve(table).expect("served");
}

fn pipes() -> (StreamTable, [std::fs::File; 3]) {
    let mut table = StreamTable::new().expect("an epoll");
    let spec = KeptStreamsSpec::Pipes { stdin: true };
    let far = table
        .open("a.1_1", spec, None, StreamsUser::Command)
        .expect("pipes");
    (table, far.map(std::fs::File::from))
}

fn attach(table: &mut StreamTable) -> OwnedFd {
    let fd = table.attach("a.1_1", None, None, true);
    let fd = fd.expect("attached");
    set_socket_timeout(&fd, Timeout::Recv, Some(Duration::from_secs(5))).expect("set");
    fd
}

#[test]
fn a_watcher_gets_what_is_kept_then_the_output_and_the_end() {
    let (mut table, [_stdin, mut stdout, mut stderr]) = pipes();
    stdout.write_all(b"before").expect("written");
    serve(&mut table);
    let watcher = attach(&mut table);
    let next = |wanted| {
        let event = receive_event(&watcher, &mut Vec::new());
        assert_eq!(event.expect("an event"), Some(wanted));
    };
    let (offset, dropped) = (0, 0);
    next(StreamEvent::Position(Position { offset, dropped }));
    next(StreamEvent::Output(
        OutputStream::Stdout,
        b"before".to_vec(),
    ));
    stderr.write_all(b"after").expect("written");
    serve(&mut table);
    next(StreamEvent::Output(OutputStream::Stderr, b"after".to_vec()));
    drop(stdout);
    serve(&mut table);
    drop(stderr);
    serve(&mut table);
    next(StreamEvent::End);
    assert!(table.watchers.is_empty());
    assert_eq!(table.fds().len(), 1, "the input");
}

#[test]
fn a_watcher_gets_what_was_written_before_the_loop_has_read_it_and_so_do_others() {
    let (mut table, [_stdin, mut stdout, _stderr]) = pipes();
    let (offset, dropped) = (0, 0);
    let begins = StreamEvent::Position(Position { offset, dropped });
    let last = StreamEvent::Output(OutputStream::Stdout, b"last".to_vec());
    let before = attach(&mut table);
    stdout.write_all(b"last").expect("written");
    let after = attach(&mut table);
    for watcher in [before, after] {
        for wanted in [&begins, &last] {
            let event = receive_event(&watcher, &mut Vec::new());
            assert_eq!(event.expect("an event").as_ref(), Some(wanted));
        }
    }
}

#[test]
fn input_reaches_the_program_up_to_its_end_and_closed_streams_have_no_watcher() {
    let (mut table, [mut stdin, _stdout, _stderr]) = pipes();
    let watcher = attach(&mut table);
    send_input(&watcher, &StreamInput::Bytes(b"hello".to_vec())).expect("sent");
    send_input(&watcher, &StreamInput::End).expect("sent");
    serve(&mut table);
    let mut text = String::new();
    stdin.read_to_string(&mut text).expect("its end");
    assert_eq!(text, "hello");
    table.close("a.1_1");
    assert_eq!(table.fds().len(), 0);
    assert!(table.attach("a.1_1", None, None, true).is_err());
}

#[test]
fn more_input_than_the_program_reads_waits_for_it() {
    let (mut table, [mut stdin, _stdout, _stderr]) = pipes();
    let watcher = attach(&mut table);
    rustix::io::ioctl_fionbio(&watcher, true).expect("not blocking");
    let (streams, watchers) = (1, 2);
    let waiting = |table: &StreamTable| table.by_name["a.1_1"].1.waiting.len();
    let mut sent = 0;
    let input = StreamInput::Bytes(vec![b'x'; MAX_INPUT_BYTES]);
    // The pipe, what waits here, and the socket.
    while send_input(&watcher, &input).is_ok() {
        sent += MAX_INPUT_BYTES;
        table.serve_watcher(watchers, EventFlags::IN);
        assert!(sent < 8 << 20, "it takes everything");
    }
    assert!((1..=MAX_INPUT_BYTES * 4).contains(&waiting(&table)));
    let mut read = 0;
    let mut buffer = vec![0; 64 * 1_024];
    while read < sent {
        read += stdin.read(&mut buffer).expect("read");
        table.serve_streams(streams * ENDS + INPUT);
        table.serve_watcher(watchers, EventFlags::IN);
    }
    assert_eq!(waiting(&table), 0);
}
