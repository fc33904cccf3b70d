//! The engines: what is done with a stream in one round. Each is a type, so that the loop around it is compiled once for each
//! and the only virtual calls are the bursts.

use std::marker::PhantomData;
use std::sync::Arc;

use super::generate::Generator;
use crate::mbuf::Mbuf;
use crate::port::{Burst, RxHandle, TxHandle};
use crate::shared::Counter;

/// Rounds without a frame after which a transmit queue's finished mbufs are fetched. Often enough to be soon, and seldom enough
/// for the peer not to notice that its index is read.
const IDLE_ROUNDS: u32 = 64;

/// What a stream counts. The worker that runs it is the only writer.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct StreamCounters {
    /// Frames received.
    pub rx: Counter,
    /// Frames that the transmit queue accepted.
    pub tx: Counter,
    /// Frames that it did not, and that were freed.
    pub tx_dropped: Counter,
    /// Frames made here.
    pub generated: Counter,
}

/// Addresses a stream writes into frames.
#[derive(Clone, Copy, Debug)]
pub(super) struct Macs {
    /// Destination and source, as they stand at the beginning of a frame.
    pub header: [u8; 12],
}

impl Macs {
    /// For frames that leave through port number `port`, whose own address is `mac`. The destination is testpmd's default peer
    /// of that port, 02:00:00:00:00:`port`.
    pub fn new(port: usize, mac: [u8; 6]) -> Self {
        let mut header = [2, 0, 0, 0, 0, port as u8, 0, 0, 0, 0, 0, 0];
        header[6..].copy_from_slice(&mac);
        Self { header }
    }
}

/// From one receive queue to one transmit queue, within one worker.
pub(super) struct Stream {
    pub rx: RxHandle,
    pub tx: TxHandle,
    /// Empty between rounds, but for generated frames that wait for room.
    pub burst: Burst,
    pub macs: Macs,
    pub generator: Generator,
    /// Rounds without a frame since the last one with.
    pub idle: u32,
    pub counters: Arc<StreamCounters>,
}

impl Stream {
    /// Sends what the transmit queue accepts, and leaves the rest in the burst.
    #[inline(always)]
    fn offer(&mut self) {
        let sent = self.tx.tx_burst(&mut self.burst);
        self.counters.tx.add(sent as u64);
    }

    /// Frees what was not sent, and counts it.
    #[inline(always)]
    pub fn drop_unsent(&mut self) {
        if !self.burst.is_empty() {
            self.counters.tx_dropped.add(self.burst.free() as u64);
        }
    }

    /// Fills the empty burst with generated frames, if there are mbufs; if not, those of frames long sent come back.
    #[inline(always)]
    fn generate(&mut self) {
        let count = self.generator.fill(&mut self.burst);
        if count == 0 {
            self.tx.reap();
        }
        self.counters.generated.add(count as u64);
    }

    /// Called in a round in which nothing came. A quiet transmit queue keeps the mbufs of what it has sent, so now and then they
    /// are fetched: the receive queue may lack them, and then nothing would ever come again.
    #[inline(always)]
    fn idle(&mut self) {
        self.idle = self.idle.wrapping_add(1);
        if self.idle.is_multiple_of(IDLE_ROUNDS) {
            self.tx.reap();
        }
    }

    /// Generates a burst and sends it; what is not accepted is dropped.
    pub fn send_first(&mut self) {
        self.generate();
        self.offer();
        self.drop_unsent();
    }
}

/// An engine.
pub(super) trait Step {
    /// What it does with `stream` in one round.
    fn round(stream: &mut Stream);
}

/// Receives and frees.
pub(super) struct RxOnly;

impl Step for RxOnly {
    #[inline(always)]
    fn round(stream: &mut Stream) {
        let received = stream.rx.rx_burst(&mut stream.burst);
        if received > 0 {
            stream.counters.rx.add(received as u64);
            stream.burst.free();
        }
    }
}

/// Generates and sends. Frames for which there is no room wait for the next round, unlike testpmd's, which are dropped: so the
/// generator makes no frame in vain, and what the queue takes is what the queue can do.
pub(super) struct TxOnly;

impl Step for TxOnly {
    #[inline(always)]
    fn round(stream: &mut Stream) {
        if stream.burst.is_empty() {
            stream.generate();
        }
        stream.offer();
    }
}

/// Receives, rewrites, and sends; what is not accepted is dropped and counted, as by testpmd.
pub(super) struct Forward<R>(PhantomData<R>);

impl<R: Rewrite> Step for Forward<R> {
    #[inline(always)]
    fn round(stream: &mut Stream) {
        let received = stream.rx.rx_burst(&mut stream.burst);
        if received == 0 {
            return stream.idle();
        }
        stream.counters.rx.add(received as u64);
        for mbuf in stream.burst.as_slice() {
            R::rewrite(&stream.macs, mbuf);
        }
        stream.offer();
        stream.drop_unsent();
    }
}

/// What a forwarding engine does to a frame.
pub(super) trait Rewrite {
    /// Changes the frame in place.
    fn rewrite(macs: &Macs, mbuf: &Mbuf);
}

/// `io`: nothing.
pub(super) struct Unchanged;

impl Rewrite for Unchanged {
    #[inline(always)]
    fn rewrite(_: &Macs, _: &Mbuf) {}
}

/// `mac`: both addresses are set.
pub(super) struct SetMacs;

impl Rewrite for SetMacs {
    #[inline(always)]
    fn rewrite(macs: &Macs, mbuf: &Mbuf) {
        mbuf.data().write(&macs.header);
    }
}

/// `macswap`: both addresses change places.
pub(super) struct SwapMacs;

impl Rewrite for SwapMacs {
    #[inline(always)]
    fn rewrite(_: &Macs, mbuf: &Mbuf) {
        let data = mbuf.data();
        let mut macs = [0; 12];
        // A frame whose first segment ends within the addresses stays as it is.
        if data.read(&mut macs) == macs.len() {
            macs.rotate_left(6);
            data.write(&macs);
        }
    }
}
