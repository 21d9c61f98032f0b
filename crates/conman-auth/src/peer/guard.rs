//! Authenticates requests at the peer listener as those of the fleet's nodes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use conman_proto::Problem;
use http::header::HeaderValue;
use http::request::Parts;

use super::cluster_secret::ClusterSecret;
use super::replay::{Nonce, NonceRefused, Nonces};
use super::seal::{
    FIRST_NUMBER, MAX_SKEW_MS, Seal, SealFault, Stamp, X_CONMAN_HOP, X_CONMAN_PEER, message, now_ms,
};

/// Maximum length of a node name.
const MAX_NAME_BYTES: usize = 253;

/// Authenticates other nodes' requests to this one.
#[derive(Debug)]
pub struct PeerGuard {
    me: String,
    secret: Option<Arc<ClusterSecret>>,
    nonces: Mutex<Nonces>,
    /// Requests sealed before this may have been recorded and replayed before this daemon started
    /// to remember nonces.
    begun_ms: AtomicU64,
}

/// The guard's state of one connection.
#[derive(Debug)]
pub struct PeerConnection {
    guard: Arc<PeerGuard>,
    binding: Vec<u8>,
    /// The connection's nonce and the number of its last request, after its first one.
    last: Mutex<Option<(Nonce, u64)>>,
}

impl PeerGuard {
    /// The guard of the node `me`. Without `secret`, every connection accepted by TLS is a node's,
    /// so one of the two is required.
    #[must_use]
    pub fn new(me: &str, secret: Option<Arc<ClusterSecret>>) -> Self {
        Self::begun_at(me, secret, now_ms())
    }

    fn begun_at(me: &str, secret: Option<Arc<ClusterSecret>>, begun_ms: u64) -> Self {
        Self {
            me: me.to_owned(),
            secret,
            nonces: Mutex::default(),
            begun_ms: AtomicU64::new(begun_ms),
        }
    }

    /// A new connection; `binding` is key material of its TLS, or empty.
    #[must_use]
    pub fn connection(self: &Arc<Self>, binding: Vec<u8>) -> PeerConnection {
        PeerConnection {
            guard: Arc::clone(self),
            binding,
            last: Mutex::new(None),
        }
    }
}

impl PeerConnection {
    /// Returns the name of the node that sent the request.
    ///
    /// # Errors
    /// 401 for a request that no node of this fleet sends, with the reason and the remedy; 503 if
    /// there are more new connections than can be remembered.
    pub fn admit(&self, parts: &Parts) -> Result<String, Box<Problem>> {
        self.admit_at(parts, now_ms())
    }

    fn admit_at(&self, parts: &Parts, now_ms: u64) -> Result<String, Box<Problem>> {
        let mut hops = parts.headers.get_all(X_CONMAN_HOP).iter();
        if (hops.next(), hops.next()) != (Some(&HeaderValue::from_static("1")), None) {
            return Err(refused(
                "this listener is for the nodes of the fleet alone: use `listen.api` or \
                 `listen.sessions`",
            ));
        }
        let mut peers = parts.headers.get_all(X_CONMAN_PEER).iter();
        let name = match (peers.next().map(HeaderValue::to_str), peers.next()) {
            (Some(Ok(name)), None) if (1..=MAX_NAME_BYTES).contains(&name.len()) => name,
            _ => return Err(refused("the request does not name one node as its sender")),
        };
        if let Some(secret) = &self.guard.secret {
            self.check_seal(name, parts, secret, now_ms)?;
        }
        Ok(name.to_owned())
    }

    fn check_seal(
        &self,
        sender: &str,
        parts: &Parts,
        secret: &ClusterSecret,
        now_ms: u64,
    ) -> Result<(), Box<Problem>> {
        let Seal { stamp, mac } = Seal::read(&parts.headers).map_err(|fault| match fault {
            SealFault::None => refused(
                "the request has no seal: its sender has no `fleet.secret_file`, and this node \
                 has one",
            ),
            SealFault::OtherVersion => refused(
                "the request's seal is of another version: the sender's conman is too new or too \
                 old for this node's; run the same on both",
            ),
        })?;
        let guard = &self.guard;
        if !secret.verify(&message(parts, &guard.me, &stamp, &self.binding), &mac) {
            return Err(refused(format!(
                "the seal does not fit: the sender's `fleet.secret_file` differs from this \
                 node's, the sender addressed another node than `{}`, or something in between \
                 changes requests",
                guard.me
            )));
        }
        // From here on the sender is authenticated, so the error may give details.
        if stamp.at_ms.abs_diff(now_ms) > MAX_SKEW_MS {
            return Err(refused(format!(
                "the request was sealed {} s from now by this node's clock: set the clocks of \
                 both nodes (NTP)",
                stamp.at_ms.abs_diff(now_ms) / 1_000
            )));
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match *last {
            Some((nonce, number)) if nonce != stamp.nonce || number >= stamp.number => {
                return Err(refused(
                    "the seal is another connection's, or was used before",
                ));
            }
            Some(_) => {}
            // A later request may be replayed long after its connection's nonce was forgotten.
            None if stamp.number != FIRST_NUMBER => {
                return Err(refused(
                    "the seal is another connection's: its number is not the first",
                ));
            }
            // TLS key material is unique to one connection: seals of others do not match.
            None if !self.binding.is_empty() => {}
            None => guard.begin(sender, &stamp, now_ms)?,
        }
        *last = Some((stamp.nonce, stamp.number));
        Ok(())
    }
}

impl PeerGuard {
    /// Remembers the nonce of a connection's first request, if only the nonce identifies the
    /// connection.
    fn begin(&self, sender: &str, stamp: &Stamp, now_ms: u64) -> Result<(), Box<Problem>> {
        // If all nodes' clocks were set back, a request recorded before can be replayed once when
        // its time comes again. TLS between the nodes prevents this.
        let begun_ms = self
            .begun_ms
            .fetch_min(now_ms, Ordering::Relaxed)
            .min(now_ms);
        if stamp.at_ms < begun_ms {
            // Sealed by a clock that is a little behind; this is temporary.
            return Err(Box::new(Problem {
                retryable: true,
                ..Problem::new(
                    "peer-too-early",
                    "Sealed before this daemon began",
                    503,
                    "the request was sealed before this daemon began, so it cannot tell whether \
                     it was used before: send it again",
                )
            }));
        }
        let until_ms = stamp.at_ms.saturating_add(MAX_SKEW_MS);
        let mut nonces = self.nonces.lock().unwrap_or_else(PoisonError::into_inner);
        match nonces.take(sender, stamp.nonce, until_ms, now_ms) {
            Ok(()) => Ok(()),
            Err(NonceRefused::Known) => Err(refused(
                "the seal is another connection's: it was used before",
            )),
            Err(NonceRefused::Full) => Err(Box::new(Problem {
                retryable: true,
                ..Problem::new(
                    "too-many-peer-connections",
                    "Too many new connections between nodes",
                    503,
                    format!(
                        "`{sender}` opens more connections to this node than it can remember: \
                         try again in a minute; with `fleet.tls` there is no such limit"
                    ),
                )
            })),
        }
    }
}

fn refused(detail: impl Into<String>) -> Box<Problem> {
    Box::new(Problem::new(
        "peer-refused",
        "Not a node of this fleet",
        401,
        detail,
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use http::Request;

    use super::super::seal::{Sealer, X_CONMAN_SEAL};
    use super::*;

    const NOW: u64 = 1_700_000_000_000;

    fn secret(text: &str) -> Arc<ClusterSecret> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fleet.key");
        fs::write(&path, text.repeat(4)).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
        Arc::new(ClusterSecret::load(path).expect("valid"))
    }

    fn guard() -> Arc<PeerGuard> {
        let secret = Some(secret("0123456789"));
        Arc::new(PeerGuard::begun_at("b", secret, NOW - 1_000))
    }

    fn sealer(key: &str) -> Sealer {
        Sealer::new(Some(secret(key)), "a", "b", Vec::new()).expect("random bytes")
    }

    fn request() -> Parts {
        let request = Request::put("/v1/sessions/x?wait=true")
            .header("host", "b:7702")
            .header("x-conman-generation", "7")
            .header("x-other", "may change on the way");
        request.body(()).expect("a request").into_parts().0
    }

    fn sealed(sealer: &Sealer, at_ms: u64) -> Parts {
        let mut parts = request();
        sealer.seal_at(&mut parts, at_ms);
        parts
    }

    fn reason(result: Result<String, Box<Problem>>) -> String {
        result.unwrap_or_else(|problem| problem.detail)
    }

    #[test]
    fn a_node_with_the_secret_is_known_for_as_many_requests_as_it_sends() {
        let (guard, sealer) = (guard(), sealer("0123456789"));
        let connection = guard.connection(Vec::new());
        for step in 0..3 {
            let mut parts = sealed(&sealer, NOW + step);
            parts.headers.remove("x-other");
            assert_eq!(reason(connection.admit_at(&parts, NOW)), "a");
        }
    }

    #[test]
    fn a_recorded_request_is_of_no_use_on_its_connection_and_on_no_other() {
        let (guard, sealer) = (guard(), sealer("0123456789"));
        let connection = guard.connection(Vec::new());
        let (first, second) = (sealed(&sealer, NOW), sealed(&sealer, NOW));
        assert_eq!(reason(connection.admit_at(&first, NOW)), "a");
        for _ in 0..2 {
            let again = reason(connection.admit_at(&first, NOW));
            assert!(again.contains("used before"), "{again}");
            // Nor a delayed one, on an attacker's connection.
            let stolen = reason(guard.connection(Vec::new()).admit_at(&second, NOW));
            assert!(stolen.contains("another connection's"), "{stolen}");
        }
        assert_eq!(reason(connection.admit_at(&second, NOW)), "a");
        let late = reason(
            guard
                .connection(Vec::new())
                .admit_at(&first, NOW + MAX_SKEW_MS + 1),
        );
        assert!(late.contains("NTP"), "{late}");
    }

    #[test]
    fn a_request_of_an_old_connection_is_of_no_use_on_a_new_one() {
        let (guard, sealer) = (guard(), sealer("0123456789"));
        let connection = guard.connection(Vec::new());
        let first = sealed(&sealer, NOW);
        assert_eq!(reason(connection.admit_at(&first, NOW)), "a");
        // The nonce was remembered until the first request's time was over.
        let later = NOW + MAX_SKEW_MS + 1;
        let recorded = sealed(&sealer, later);
        let stolen = reason(guard.connection(Vec::new()).admit_at(&recorded, later));
        assert!(stolen.contains("another connection's"), "{stolen}");
        assert_eq!(reason(connection.admit_at(&recorded, later)), "a");
    }

    #[test]
    fn what_was_sealed_before_the_daemon_began_is_refused_and_may_be_sent_again() {
        let (guard, sealer) = (guard(), sealer("0123456789"));
        let early = guard
            .connection(Vec::new())
            .admit_at(&sealed(&sealer, NOW - 1_001), NOW);
        let early = early.expect_err("too early");
        assert!(early.retryable, "{early:?}");
        assert!(
            early.detail.contains("before this daemon began"),
            "{early:?}"
        );
    }

    #[test]
    fn of_a_connection_that_key_material_tells_from_others_nothing_is_noted() {
        let guard = guard();
        let secret = Some(secret("0123456789"));
        let sealer = Sealer::new(secret, "a", "b", vec![1]).expect("random bytes");
        let first = sealed(&sealer, NOW - 1_001);
        let connection = guard.connection(vec![1]);
        assert_eq!(reason(connection.admit_at(&first, NOW)), "a");
        let again = reason(connection.admit_at(&first, NOW));
        assert!(again.contains("used before"), "{again}");
        let stolen = reason(guard.connection(vec![2]).admit_at(&first, NOW));
        assert!(stolen.contains("does not fit"), "{stolen}");
        let noted = guard.nonces.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(format!("{noted:?}"), format!("{:?}", Nonces::default()));
    }

    #[test]
    fn a_clock_that_is_set_keeps_no_node_out() {
        const DAY_MS: u64 = 86_400_000;
        let guard = guard();
        for now in [NOW - DAY_MS, NOW + DAY_MS, NOW] {
            let parts = sealed(&sealer("0123456789"), now);
            let admitted = guard.connection(Vec::new()).admit_at(&parts, now);
            assert_eq!(reason(admitted), "a");
        }
    }

    #[test]
    fn clocks_may_differ_by_so_much_and_no_more() {
        for (at_ms, known) in [(NOW + MAX_SKEW_MS, true), (NOW + MAX_SKEW_MS + 1, false)] {
            let parts = sealed(&sealer("0123456789"), at_ms);
            let admitted = guard().connection(Vec::new()).admit_at(&parts, NOW);
            assert_eq!(admitted.is_ok(), known, "{}", reason(admitted));
        }
    }

    #[test]
    fn whatever_is_changed_on_the_way_breaks_the_seal() {
        let change: [&dyn Fn(&mut Parts); 8] = [
            &|parts| parts.method = http::Method::DELETE,
            &|parts| parts.uri = "/v1/sessions/y?wait=true".parse().expect("a target"),
            &|parts| parts.uri = "/v1/sessions/x".parse().expect("a target"),
            &|parts| set(parts, "x-conman-generation", "8"),
            &|parts| set(parts, "x-conman-fleet", "c"),
            &|parts| set(parts, "x-conman-caller", "admin"),
            &|parts| set(parts, "host", "c:7702"),
            &|parts| {
                let seal = parts.headers[&X_CONMAN_SEAL].to_str().expect("text");
                let flipped = if seal.ends_with('0') { "1" } else { "0" };
                let seal = format!("{}{flipped}", &seal[..seal.len() - 1]);
                set(parts, "x-conman-seal", &seal);
            },
        ];
        for (number, change) in change.iter().enumerate() {
            let mut parts = sealed(&sealer("0123456789"), NOW);
            change(&mut parts);
            let told = reason(guard().connection(Vec::new()).admit_at(&parts, NOW));
            assert!(told.contains("does not fit"), "change {number}: {told}");
        }
    }

    fn set(parts: &mut Parts, name: &'static str, value: &str) {
        let value = HeaderValue::from_str(value).expect("a value");
        parts.headers.insert(name, value);
    }

    #[test]
    fn another_secret_another_addressee_and_other_key_material_do_not_fit() {
        let others = [
            sealer("9876543210"),
            Sealer::new(Some(secret("0123456789")), "a", "c", Vec::new()).expect("random"),
            Sealer::new(Some(secret("0123456789")), "a", "b", vec![1]).expect("random"),
        ];
        for other in others {
            let parts = sealed(&other, NOW);
            let told = reason(guard().connection(Vec::new()).admit_at(&parts, NOW));
            assert!(told.contains("does not fit"), "{told}");
        }
        let bound = Sealer::new(Some(secret("0123456789")), "a", "b", vec![1]).expect("random");
        let parts = sealed(&bound, NOW);
        assert_eq!(
            reason(guard().connection(vec![1]).admit_at(&parts, NOW)),
            "a"
        );
    }

    #[test]
    fn requests_that_no_node_sends_are_refused() {
        let connection = guard().connection(Vec::new());
        let told = reason(connection.admit_at(&request(), NOW));
        assert!(told.contains("for the nodes of the fleet alone"), "{told}");
        let mut parts = sealed(&sealer("0123456789"), NOW);
        parts
            .headers
            .append(X_CONMAN_HOP, HeaderValue::from_static("1"));
        assert!(connection.admit_at(&parts, NOW).is_err());
        let mut parts = sealed(&sealer("0123456789"), NOW);
        parts
            .headers
            .append(X_CONMAN_PEER, HeaderValue::from_static("b"));
        assert!(connection.admit_at(&parts, NOW).is_err());
        for seal in ["", "v1", "v2 1 00 1 00", "v1 x y z w", &"v1 ".repeat(50)] {
            let mut parts = sealed(&sealer("0123456789"), NOW);
            set(&mut parts, "x-conman-seal", seal);
            let told = reason(connection.admit_at(&parts, NOW));
            let says = match seal.starts_with("v2") {
                true => "another version",
                false => "no seal",
            };
            assert!(told.contains(says), "{told}");
        }
    }
}
