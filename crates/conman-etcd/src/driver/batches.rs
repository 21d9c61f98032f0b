//! Batches of releases: as many as fit into one transaction.

use super::super::store::MAX_RELEASES;
use super::Sent;

/// etcd's default request limit is 1.5 MiB; a third of it, because a request holds more than
/// records.
const MAX_BYTES: usize = 512 * 1024;

/// The comparison and the write of the ownership: a few names and numbers.
const OWN_BYTES: usize = 1_024;

/// Keeps the order. A release that is too large is sent alone.
pub(super) fn of(releases: Vec<Sent>) -> Vec<Vec<Sent>> {
    split(releases, |one| {
        let told = one.additions.write.iter().map(prost::Message::encoded_len);
        told.sum::<usize>() + OWN_BYTES
    })
}

fn split<T>(items: Vec<T>, size: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let mut batches: Vec<Vec<T>> = Vec::new();
    let mut bytes = 0;
    for item in items {
        let more = size(&item);
        match batches.last_mut() {
            Some(batch) if batch.len() < MAX_RELEASES && bytes + more <= MAX_BYTES => {
                bytes += more;
                batch.push(item);
            }
            _ => {
                bytes = more;
                batches.push(vec![item]);
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(items: Vec<usize>) -> Vec<Vec<usize>> {
        split(items, |size| *size)
    }

    #[test]
    fn a_batch_is_bounded_in_number_and_in_bytes() {
        assert!(sizes(Vec::new()).is_empty());
        let many = sizes(vec![1; MAX_RELEASES * 2 + 1]);
        let lengths: Vec<usize> = many.iter().map(Vec::len).collect();
        assert_eq!(lengths, [MAX_RELEASES, MAX_RELEASES, 1]);
        let third = MAX_BYTES / 3;
        assert_eq!(sizes(vec![third; 4]), [vec![third; 3], vec![third]]);
    }

    #[test]
    fn what_is_too_large_by_itself_goes_alone() {
        let large = MAX_BYTES + 1;
        assert_eq!(sizes(vec![1, large, 1]), [vec![1], vec![large], vec![1]]);
    }
}
