//! How answers of the kernel are read from datagrams.

use std::fmt::Debug;
use std::io;
use std::num::NonZeroI32;

use bytes::BytesMut;
use netlink_packet_core::{
    ErrorMessage, NetlinkBuffer, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable, Parseable as _,
};
use rtnetlink::proto::{NetlinkCodec, NetlinkMessageCodec};
use rustix::io::Errno;

/// Answers a request with an error if a part of its answer cannot be read. The library's codec skips such a part,
/// so that a list would lack what it is about, and a link that exists would count as gone.
#[derive(Debug)]
pub(crate) struct StrictCodec;

impl NetlinkMessageCodec for StrictCodec {
    fn decode<T>(datagram: &mut BytesMut) -> io::Result<Option<NetlinkMessage<T>>>
    where
        T: NetlinkDeserializable + Debug,
    {
        if datagram.is_empty() {
            return Ok(None);
        }
        let unreadable = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let buffer = NetlinkBuffer::new_checked(&datagram[..]).map_err(unreadable)?;
        let length = buffer.length() as usize;
        let header = NetlinkHeader::parse(&buffer).map_err(unreadable)?;
        let message = NetlinkMessage::deserialize(&datagram.split_to(length));
        Ok(Some(message.unwrap_or_else(|error| {
            tracing::warn!(
                message_type = header.message_type,
                %error,
                "cannot read a message of the kernel about links, addresses or routes"
            );
            let mut bad = ErrorMessage::default();
            bad.code = NonZeroI32::new(-Errno::BADMSG.raw_os_error());
            NetlinkMessage::new(header, NetlinkPayload::Error(bad))
        })))
    }

    fn encode<T>(message: NetlinkMessage<T>, datagram: &mut BytesMut) -> io::Result<()>
    where
        T: NetlinkSerializable + Debug,
    {
        NetlinkCodec::encode(message, datagram)
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::RouteNetlinkMessage;
    use netlink_packet_route::link::LinkMessage;

    use super::*;

    type Message = NetlinkMessage<RouteNetlinkMessage>;

    #[test]
    fn a_message_that_cannot_be_read_is_an_error_and_not_a_missing_one() {
        let mut link = Message::from(RouteNetlinkMessage::NewLink(LinkMessage::default()));
        link.header.sequence_number = 7;
        link.finalize();
        let mut whole = vec![0; link.buffer_len()];
        link.serialize(&mut whole);
        // The header alone, and then a whole message.
        let mut datagram = BytesMut::from(&whole[..16]);
        datagram[0] = 16;
        datagram.extend_from_slice(&whole);
        let read: Vec<Message> = std::iter::from_fn(|| {
            let read = StrictCodec::decode(&mut datagram);
            read.expect("two messages")
        })
        .collect();
        let [bad, good] = &read[..] else {
            panic!("{read:?}");
        };
        assert_eq!(bad.header.sequence_number, 7);
        let NetlinkPayload::Error(error) = &bad.payload else {
            panic!("{bad:?}");
        };
        let errno = Errno::from_io_error(&error.to_io());
        assert_eq!(errno, Some(Errno::BADMSG));
        assert!(matches!(good.payload, NetlinkPayload::InnerMessage(_)));
    }
}
