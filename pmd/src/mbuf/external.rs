//! Buffers that belong to somebody else.

use std::sync::Arc;

use crate::mem::Span;

/// Memory that mbufs can carry without it being their data room, kept alive until the last of them is free.
pub struct ExternalBuffer {
    pub(super) addr: *mut u8,
    pub(super) iova: u64,
    pub(super) len: u16,
    on_free: Option<Box<dyn FnOnce() + Send + Sync>>,
}

// SAFETY: `new`'s contract: bytes that any thread may read and write until `on_free` runs.
unsafe impl Send for ExternalBuffer {}
// SAFETY: as above.
unsafe impl Sync for ExternalBuffer {}

impl ExternalBuffer {
    /// `len` bytes (at most 65535) at `addr`, which devices know as `iova`. `on_free` runs once, on whatever thread drops the
    /// last reference.
    ///
    /// # Safety
    /// The bytes stay readable and writable until `on_free` runs, and no Rust reference covers them until then.
    pub unsafe fn new(
        addr: *mut u8,
        iova: u64,
        len: u16,
        on_free: impl FnOnce() + Send + Sync + 'static,
    ) -> Arc<ExternalBuffer> {
        Arc::new(Self { addr, iova, len, on_free: Some(Box::new(on_free)) })
    }

    /// All of `span`, if that is at most 65535 bytes; `on_free` as in [`new`](Self::new).
    #[must_use]
    pub fn of_span(span: Span, on_free: impl FnOnce() + Send + Sync + 'static) -> Option<Arc<ExternalBuffer>> {
        let (addr, iova, len) = (span.addr(0).as_ptr(), span.iova(0), u16::try_from(span.size()).ok()?);
        let on_free = || {
            drop(span);
            on_free();
        };
        // SAFETY: a span stays mapped until it is dropped, and its bytes are only ever reached as shared bytes.
        Some(unsafe { Self::new(addr, iova, len, on_free) })
    }
}

impl Drop for ExternalBuffer {
    fn drop(&mut self) {
        if let Some(on_free) = self.on_free.take() {
            on_free();
        }
    }
}

impl std::fmt::Debug for ExternalBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ExternalBuffer({} bytes, iova {:#x})", self.len, self.iova)
    }
}
