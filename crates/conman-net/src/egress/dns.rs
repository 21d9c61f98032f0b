//! The resolver inside a session: addresses of the names that the session may connect to. A session that talks to
//! others gets the addresses of those, and the answers of the node's name servers to everything else.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use conman_core::egress::TargetHost;
use conman_core::{TalkName, is_talk_name};
use hickory_resolver::proto::op::{Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::{DNSClass, RData, Record};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::dial::{is_hosts, look_up};
use super::forward::{Transport, forward};
use super::resolver::LookupError;
use super::session::Session;
use super::shared_stream::SharedStream;

/// Largest query that is read.
const QUERY_BYTES: usize = 4_096;
/// Queries of a session by UDP that are answered at a time; the kernel queues further ones.
const MAX_QUERIES: usize = 16;
/// Bound on the arrival of a query by TCP.
const QUERY: Duration = Duration::from_secs(10);
/// How long programs may cache an answer, in seconds; and one about a session, which may move.
const TTL_S: u32 = 10;
const TALK_TTL_S: u32 = 0;

/// Answers queries by UDP, each in a task that ends with this future.
pub(super) async fn datagrams(session: &Arc<Session>, socket: UdpSocket) {
    let socket = Arc::new(socket);
    let places = Arc::new(Semaphore::new(MAX_QUERIES));
    let mut answering = JoinSet::new();
    let mut query = vec![0; QUERY_BYTES];
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        while answering.try_join_next().is_some() {}
        // An error is of an earlier answer, which its client did not wait for.
        let Ok((length, client)) = socket.recv_from(&mut query).await else {
            continue;
        };
        let (session, socket) = (Arc::clone(session), Arc::clone(&socket));
        let query = query[..length].to_vec();
        answering.spawn(async move {
            if let Some(bytes) = answer(&session, &query, Transport::Datagram).await {
                // The client may be gone.
                let _ = socket.send_to(&bytes, client).await;
            }
            drop(place);
        });
    }
}

/// Answers queries on a connection, one after the other.
pub(super) async fn stream(session: Arc<Session>, mut client: SharedStream) {
    while let Ok(Ok(query)) = timeout(QUERY, read(&mut client)).await {
        let Some(bytes) = answer(&session, &query, Transport::Stream).await else {
            return;
        };
        let Ok(length) = u16::try_from(bytes.len()) else {
            return;
        };
        let framed = [&length.to_be_bytes()[..], &bytes].concat();
        if !matches!(timeout(QUERY, client.write_all(&framed)).await, Ok(Ok(()))) {
            return;
        }
    }
}

async fn read(client: &mut SharedStream) -> io::Result<Vec<u8>> {
    let length = usize::from(client.read_u16().await?);
    if length > QUERY_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut query = vec![0; length];
    client.read_exact(&mut query).await?;
    Ok(query)
}

/// Returns the answer to a query; `None` if it is not a query.
async fn answer(session: &Session, query: &[u8], transport: Transport) -> Option<Vec<u8>> {
    let parsed = Message::from_vec(query).ok();
    let is_own = |query: &Message| query.queries.iter().any(is_of_sessions);
    if session.groups.is_some() && !parsed.as_ref().is_some_and(is_own) {
        let _place = session.lookups.acquire().await;
        let forwarded = forward(&session.node.servers, query, transport).await;
        return forwarded.or_else(|| {
            let parsed = parsed?;
            let mut failed = response(&parsed);
            failed.metadata.response_code = ResponseCode::ServFail;
            failed.add_queries(parsed.queries);
            failed.to_vec().ok()
        });
    }
    let parsed = parsed?;
    if parsed.metadata.message_type != MessageType::Query {
        return None;
    }
    let room = usize::from(parsed.max_payload());
    let answer = own_answer(session, &parsed).await;
    let whole = answer.to_vec().ok();
    match transport {
        Transport::Stream => whole,
        Transport::Datagram => {
            let whole = whole.filter(|bytes| bytes.len() <= room);
            whole.or_else(|| answer.truncate().to_vec().ok())
        }
    }
}

fn response(query: &Message) -> Message {
    let mut answer = Message::response(query.metadata.id, query.metadata.op_code);
    answer.metadata = Metadata::response_from_request(&query.metadata);
    answer.metadata.recursion_available = true;
    answer
}

fn is_of_sessions(question: &Query) -> bool {
    match TargetHost::parse(&question.name.to_ascii()) {
        Ok(TargetHost::Name(name)) => is_talk_name(&name),
        _ => false,
    }
}

async fn own_answer(session: &Session, query: &Message) -> Message {
    let mut answer = response(query);
    let [question] = &query.queries[..] else {
        answer.metadata.response_code = ResponseCode::FormErr;
        return answer;
    };
    answer.add_query(question.clone());
    if query.metadata.op_code != OpCode::Query || question.query_class != DNSClass::IN {
        answer.metadata.response_code = ResponseCode::NotImp;
        return answer;
    }
    let name = question.name.to_ascii();
    let (found, ttl_s) = match &session.groups {
        Some(groups) => (of_sessions(session, groups, &name).await, TALK_TTL_S),
        None => (addresses(session, &name).await, TTL_S),
    };
    match found {
        Ok(addresses) => {
            let records = addresses
                .into_iter()
                .map(RData::from)
                .filter(|data| data.record_type() == question.query_type)
                .map(|data| Record::from_rdata(question.name.clone(), ttl_s, data));
            answer.add_answers(records);
        }
        Err(code) => answer.metadata.response_code = code,
    }
    answer
}

/// The addresses of sessions that this one may talk to.
async fn of_sessions(
    session: &Session,
    groups: &[String],
    name: &str,
) -> Result<Vec<IpAddr>, ResponseCode> {
    let name = match TargetHost::parse(name) {
        Ok(TargetHost::Name(name)) => TalkName::parse(&name),
        _ => None,
    };
    let name = name.ok_or(ResponseCode::NXDomain)?;
    let names = &session.node.talk;
    match names.resolve(&name, groups, &session.pace).await {
        Ok(Some(addresses)) => Ok(addresses),
        Ok(None) => Err(ResponseCode::NXDomain),
        Err(error) => {
            tracing::debug!(?name, error, "cannot find a session by name");
            Err(ResponseCode::ServFail)
        }
    }
}

async fn addresses(session: &Session, name: &str) -> Result<Vec<IpAddr>, ResponseCode> {
    let Ok(TargetHost::Name(name)) = TargetHost::parse(name) else {
        return Err(ResponseCode::NXDomain);
    };
    if !session.rules.may_look_up(&name) {
        let listed = "it is not in the session's egress list; add it to `egress` of the template";
        let sentence = format!("lookup of {name}: {listed}");
        session.refused("name_not_listed", &name, &sentence);
        return Err(ResponseCode::NXDomain);
    }
    match look_up(session, &name).await {
        Ok(addresses) => {
            let mut shown = Vec::new();
            for address in addresses {
                // Without a route to it, it is not the host's.
                let is_hosts = is_hosts(&session.node.netlink, address).await;
                let special = &session.node.special;
                if session
                    .rules
                    .may_learn(address, special, is_hosts.unwrap_or(false))
                {
                    shown.push(address);
                }
            }
            match shown.is_empty() {
                true => Err(ResponseCode::NXDomain),
                false => Ok(shown),
            }
        }
        Err(LookupError::NoAddress) => Ok(Vec::new()),
        Err(LookupError::NoSuchName) => Err(ResponseCode::NXDomain),
        Err(LookupError::TimedOut | LookupError::Failed(_)) => Err(ResponseCode::ServFail),
    }
}
