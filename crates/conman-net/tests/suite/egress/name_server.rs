//! A name server on the host's loopback.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use hickory_resolver::proto::op::{Message, ResponseCode};
use hickory_resolver::proto::rr::{RData, Record};
use tokio::net::UdpSocket;

/// Never answered.
pub(crate) const HANGS: &str = "hangs.test";

type Answers = Arc<Mutex<HashMap<String, Vec<IpAddr>>>>;

pub(crate) struct NameServer {
    pub(crate) address: SocketAddr,
    answers: Answers,
}

impl NameServer {
    pub(crate) async fn start() -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let socket = socket.expect("a port");
        let address = socket.local_addr().expect("bound");
        let answers = Answers::default();
        tokio::spawn(run(socket, Arc::clone(&answers)));
        Self { address, answers }
    }

    /// Sets the answer for a name. Programs may not keep it.
    pub(crate) fn set(&self, name: &str, address: impl Into<IpAddr>) {
        let mut answers = self.answers.lock().expect("whole");
        answers.insert(name.to_owned(), vec![address.into()]);
    }
}

async fn run(socket: UdpSocket, answers: Answers) {
    let mut bytes = [0; 1_024];
    while let Ok((length, client)) = socket.recv_from(&mut bytes).await {
        let query = Message::from_vec(&bytes[..length]).expect("a query");
        let name = query.queries[0].name.to_ascii().to_lowercase();
        let name = name.trim_end_matches('.');
        if name == HANGS {
            continue;
        }
        let question = query.queries[0].clone();
        let known = answers.lock().expect("whole").get(name).cloned();
        let mut answer = query.into_response();
        match known {
            None => answer.metadata.response_code = ResponseCode::NXDomain,
            Some(addresses) => {
                let data = addresses.into_iter().map(RData::from);
                let data = data.filter(|data| data.record_type() == question.query_type);
                let record = |data| Record::from_rdata(question.name.clone(), 0, data);
                answer.add_answers(data.map(record));
            }
        }
        let answer = answer.to_vec().expect("small");
        socket.send_to(&answer, client).await.expect("sent");
    }
}
