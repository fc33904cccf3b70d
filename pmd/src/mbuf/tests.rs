//! What mbufs and their pools promise.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{ExternalBuffer, HEADROOM, Mbuf, MbufFault, MbufPool, MbufPoolConfig, Staged};
use crate::mem::{Arena, Pages};
use crate::mempool::Worker;

fn pool(count: u32) -> MbufPool {
    let config = MbufPoolConfig { count, cache_size: count.min(32) as usize, ..MbufPoolConfig::default() };
    MbufPool::new(&config, &Arena::new(config.arena_bytes(), &Pages::Plain).unwrap()).unwrap()
}

fn packet(pool: &MbufPool, bytes: &[u8]) -> Mbuf {
    let mut mbuf = pool.alloc().unwrap();
    mbuf.append(bytes.len()).unwrap().write(bytes);
    mbuf
}

/// Overwrites the words of line 1 that a receive or free path could touch, but for `next`, which must stay null.
fn poison(mbuf: &mut Mbuf) {
    let m = mbuf.raw();
    m.tx_offload.set(0x5a5a);
    m.seqn.set(0x5a5a);
    m.timestamp.set(0x5a5a);
}

#[test]
fn receiving_and_freeing_one_segment_leaves_line_1_alone() {
    let pool = pool(1);
    let mut mbuf = pool.alloc().unwrap();
    poison(&mut mbuf);
    mbuf.receive(HEADROOM, 3, 60);
    assert_eq!((mbuf.port(), mbuf.pkt_len(), mbuf.data_len(), mbuf.nb_segs()), (3, 60, 60, 1));
    drop(mbuf);
    let mbuf = pool.raw_alloc().unwrap();
    let m = mbuf.raw();
    assert_eq!((m.tx_offload.get(), m.seqn.get(), m.timestamp.get()), (0x5a5a, 0x5a5a, 0x5a5a));
}

#[test]
fn every_way_home_restores_the_pools_invariant() {
    let pool = pool(64);
    let other = self::pool(8);
    let chain = |n: usize| {
        let mut head = packet(&pool, &[0; 60]);
        (1..n).for_each(|_| head.chain(packet(&pool, &[1; 60])).unwrap());
        head
    };
    drop(chain(5));
    let mut nested = chain(2);
    nested.chain(chain(3)).unwrap();
    Mbuf::free_bulk([nested, packet(&other, &[0; 60]), packet(&pool, &[0; 60])]);
    let original = chain(3);
    let clone = original.clone(&other).unwrap();
    let second = clone.clone(&other).unwrap();
    drop(original);
    assert_eq!(pool.mempool().in_use(), 3, "clones keep the data");
    drop(clone);
    drop(second);
    assert_eq!(chain(4).prefree_seg().map(drop), Some(()));
    assert_eq!((pool.mempool().in_use(), other.mempool().in_use()), (0, 0));
    for _ in 0..64 {
        let mbuf = pool.raw_alloc().unwrap();
        assert!(mbuf.raw().is_plain() && mbuf.raw().next.get().is_null());
        std::mem::forget(mbuf);
    }
}

#[test]
fn staged_mbufs_go_home_unread_and_others_the_slow_way() {
    let (pool, other) = (pool(8), pool(8));
    let shared = packet(&pool, &[0; 60]);
    let clone = shared.clone(&other).unwrap();
    let mut slots = [packet(&pool, &[0; 60]), shared, packet(&other, &[0; 60])].map(Staged::new);
    assert_eq!(Staged::free_bulk(&mut slots), 2);
    assert_eq!((pool.mempool().in_use(), other.mempool().in_use()), (1, 1));
    drop(clone);
    assert_eq!((pool.mempool().in_use(), other.mempool().in_use()), (0, 0));
}

#[test]
fn an_external_buffer_is_released_once_with_its_last_mbuf() {
    let (pool, released) = (pool(4), Arc::new(AtomicUsize::new(0)));
    let bytes: &'static mut [u8] = Box::leak(vec![7; 256].into_boxed_slice());
    let count = Arc::clone(&released);
    // SAFETY: leaked, so valid for ever; the reference is not used again.
    let buffer = unsafe {
        ExternalBuffer::new(bytes.as_mut_ptr(), 0x1000, 256, move || {
            count.fetch_add(1, Ordering::Relaxed);
        })
    };
    let mut mbuf = pool.alloc().unwrap();
    mbuf.attach_external(&buffer).unwrap();
    drop(buffer);
    mbuf.append(100).unwrap();
    let clone = mbuf.clone(&pool).unwrap();
    drop(mbuf);
    assert_eq!(released.load(Ordering::Relaxed), 0);
    assert_eq!(clone.data().get::<1>(), Some([7]));
    drop(clone);
    assert_eq!((released.load(Ordering::Relaxed), pool.mempool().in_use()), (1, 0));
}

#[test]
fn edits_stay_inside_the_buffer() {
    let pool = pool(4);
    let mut mbuf = packet(&pool, &[9; 100]);
    assert!(mbuf.prepend(usize::from(HEADROOM) + 1).is_none());
    assert!(mbuf.prepend(usize::from(HEADROOM)).is_some());
    assert!(mbuf.append(mbuf.tailroom() + 1).is_none());
    assert!(!mbuf.adj(229) && mbuf.adj(128));
    assert!(!mbuf.trim(101) && mbuf.trim(40));
    assert_eq!((mbuf.pkt_len(), mbuf.data_len()), (60, 60));
    mbuf.chain(packet(&pool, &[8; 10])).unwrap();
    let mut out = [0; 4];
    assert!(mbuf.read(58, &mut out) && out == [9, 9, 8, 8]);
    assert!(!mbuf.read(usize::MAX - 1, &mut out), "an offset near the end of the address space does not wrap");
    assert!(mbuf.write(59, &[1, 2]) && mbuf.read(58, &mut out) && out == [9, 1, 2, 8]);
    assert_eq!(mbuf.copy(&pool, 70, 0).unwrap().pkt_len(), 0, "a copy from the very end is empty");
    assert!(mbuf.linearize() && mbuf.nb_segs() == 1 && mbuf.read(58, &mut out) && out == [9, 1, 2, 8]);
}

#[test]
fn the_check_names_what_is_wrong() {
    let pool = pool(2);
    let mut mbuf = packet(&pool, &[0; 60]);
    mbuf.check().unwrap();
    mbuf.raw().refcnt.corrupt(0);
    assert_eq!(mbuf.check(), Err(MbufFault::Refcnt { segment: 0, refcnt: 0 }));
    mbuf.raw().refcnt.corrupt(1);
    mbuf.raw().pkt_len.set(61);
    assert_eq!(mbuf.check(), Err(MbufFault::Length { said: 61, found: 60 }));
    mbuf.reset();
    mbuf.check().unwrap();
}

#[test]
fn a_bulk_is_served_in_full_or_not_at_all() {
    let pool = pool(40);
    for cached in [false, true] {
        let worker = cached.then(|| Worker::enter().unwrap());
        let mut out = Vec::new();
        assert!(pool.alloc_bulk(&mut out, 41).is_err());
        assert_eq!((out.len(), pool.mempool().in_use()), (0, 0));
        pool.alloc_bulk(&mut out, 30).unwrap();
        assert!(pool.alloc_bulk(&mut out, 11).is_err());
        pool.alloc_bulk(&mut out, 10).unwrap();
        Mbuf::free_bulk(out);
        assert_eq!(pool.mempool().in_use(), 0);
        drop(worker);
    }
    assert!(pool.mempool().stats().uncached_gets > 0, "a thread without a cache is counted");
}

#[test]
fn the_cache_flushes_and_refills_by_halves() {
    let config = MbufPoolConfig { count: 64, cache_size: 8, ..MbufPoolConfig::default() };
    let pool = MbufPool::new(&config, &Arena::new(config.arena_bytes(), &Pages::Plain).unwrap()).unwrap();
    let _worker = Worker::enter().unwrap();
    let gets = || pool.mempool().stats().ring_gets;
    let puts = || pool.mempool().stats().ring_puts;
    let mut out = Vec::new();
    // A miss of 3 draws 4 and leaves 1; the next 1 is a hit, the next 3 a miss again.
    for (count, expected) in [(3, 1), (1, 1), (3, 2), (5, 3), (1, 4)] {
        pool.alloc_bulk(&mut out, count).unwrap();
        assert_eq!(gets(), expected, "get of {count}");
    }
    // 3 are cached; 5 fit; 4 more flush the oldest 4; 5 are more than half, so they go straight to the ring.
    for (count, expected) in [(5, 0), (4, 1), (4 - 3, 2)] {
        Mbuf::free_bulk(out.drain(..count));
        assert!(puts() <= expected, "put of {count}: {}", puts());
    }
    Mbuf::free_bulk(out);
    assert_eq!(pool.mempool().in_use(), 0);
}

#[test]
fn a_pool_dropped_with_mbufs_out_lasts_until_they_are_home() {
    let pool = pool(4);
    let mbuf = packet(&pool, &[5; 60]);
    drop(pool);
    assert_eq!(mbuf.data().get::<1>(), Some([5]));
    drop(mbuf);
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "double free")]
fn debug_builds_name_a_double_free() {
    let pool = pool(2);
    let raw = pool.alloc().unwrap().into_raw();
    drop(Mbuf(raw));
    // The second handle to one header is what safe code cannot make. Freeing through the mempool names it.
    // SAFETY: deliberately wrong: the object is home already.
    unsafe { pool.mempool().put_bulk(&[raw.cast()]) };
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "use after free")]
fn debug_builds_name_a_use_after_free() {
    let pool = pool(2);
    let raw = pool.alloc().unwrap().into_raw();
    drop(Mbuf(raw));
    let stale = std::mem::ManuallyDrop::new(Mbuf(raw));
    let _ = stale.pkt_len();
}

#[cfg(debug_assertions)]
#[test]
#[should_panic(expected = "foreign object")]
fn debug_builds_name_a_foreign_object() {
    let (pool, other) = (pool(2), pool(2));
    let raw = std::mem::ManuallyDrop::new(other.alloc().unwrap());
    // SAFETY: deliberately wrong: the object belongs to another pool.
    unsafe { pool.mempool().put_bulk(&[raw.0.cast()]) };
}
