//! SOCKS5 (RFC 1928): CONNECT without authentication.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::dial::{DialError, dial};
use super::session::{Client, Session};
use super::tunnel;

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const NO_METHOD: u8 = 0xff;
const CONNECT: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// Bound on the client's part of the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Replies of RFC 1928, section 6.
#[derive(Clone, Copy)]
enum Reply {
    Succeeded = 0,
    NotAllowed = 2,
    HostUnreachable = 4,
    Refused = 5,
    CommandUnsupported = 7,
    AddressUnsupported = 8,
}

impl From<&DialError> for Reply {
    fn from(error: &DialError) -> Self {
        match error {
            DialError::Refused(_) => Self::NotAllowed,
            DialError::Host(_) => Self::AddressUnsupported,
            DialError::Connect { source, .. }
                if source.kind() == io::ErrorKind::ConnectionRefused =>
            {
                Self::Refused
            }
            DialError::Lookup(_) | DialError::Connect { .. } | DialError::TimedOut { .. } => {
                Self::HostUnreachable
            }
        }
    }
}

pub(super) async fn serve(session: &Session, client: Client) {
    let Client { stream, sockets } = client;
    let mut client = session.metered(stream);
    let asked = timeout(HANDSHAKE, handshake(&mut client)).await;
    let (host, port) = match asked {
        Ok(Ok(Ok(target))) => target,
        Ok(Ok(Err(reply))) => {
            session.refused(
                "bad_request",
                "SOCKS5",
                "a SOCKS5 request other than CONNECT to a host",
            );
            let _ = answer(&mut client, reply).await;
            return;
        }
        // It has disconnected, is too slow, or does not speak SOCKS5.
        _ => return,
    };
    match dial(session, &sockets, &host, port).await {
        Ok(target) => {
            if answer(&mut client, Reply::Succeeded).await.is_ok() {
                tunnel::run(client, target).await;
            }
        }
        Err(error) => {
            let _ = answer(&mut client, Reply::from(&error)).await;
        }
    }
}

/// Reads the greeting and the request. The inner error is the reply to the request.
async fn handshake(
    client: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<Result<(String, u16), Reply>> {
    let [version, methods] = read(client).await?;
    let mut offered = vec![0; methods.into()];
    client.read_exact(&mut offered).await?;
    if version != VERSION || !offered.contains(&NO_AUTHENTICATION) {
        client.write_all(&[VERSION, NO_METHOD]).await?;
        return Err(io::ErrorKind::InvalidData.into());
    }
    client.write_all(&[VERSION, NO_AUTHENTICATION]).await?;
    let [version, command, _, kind] = read(client).await?;
    if version != VERSION {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let host = match kind {
        IPV4 => IpAddr::from(Ipv4Addr::from(read(client).await?)).to_string(),
        IPV6 => IpAddr::from(Ipv6Addr::from(read::<16>(client).await?)).to_string(),
        NAME => {
            let [length] = read(client).await?;
            let mut name = vec![0; length.into()];
            client.read_exact(&mut name).await?;
            // What is not UTF-8 is refused as a name.
            String::from_utf8_lossy(&name).into_owned()
        }
        _ => return Ok(Err(Reply::AddressUnsupported)),
    };
    let port = u16::from_be_bytes(read(client).await?);
    if command != CONNECT {
        return Ok(Err(Reply::CommandUnsupported));
    }
    Ok(Ok((host, port)))
}

async fn read<const N: usize>(client: &mut (impl AsyncRead + Unpin)) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    client.read_exact(&mut bytes).await?;
    Ok(bytes)
}

/// Replies; the bound address is left unspecified, as clients do not use it after CONNECT.
async fn answer(client: &mut (impl AsyncWrite + Unpin), reply: Reply) -> io::Result<()> {
    let answer = [VERSION, reply as u8, 0, IPV4, 0, 0, 0, 0, 0, 0];
    client.write_all(&answer).await
}
