//! SIGBUS on guest memory: a peer that shortens the file behind its memory breaks its own connection, not the daemon.
//!
//! The handler finds the mapping of the faulting address in a static table, without a lock, puts zero pages where the
//! file has none any more, and marks the mapping broken. The instruction then repeats, and reads zeros. Any other
//! SIGBUS goes to whoever handled it before.
#![expect(unsafe_code, reason = "installs a signal handler that replaces pages of a mapping")]

use std::io;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

use crate::error::Error;

/// Mappings that can exist at a time in this process.
pub(crate) const MAPPINGS_MAX: usize = 1024;

/// `Slot::start` of a free slot.
const FREE: usize = 0;
/// `Slot::start` of a slot that is being filled; no mapping begins there.
const CLAIMED: usize = 1;

/// One live mapping. `start` says whether the rest is valid.
#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    page: AtomicUsize,
    broken: AtomicBool,
}

static SLOTS: [Slot; MAPPINGS_MAX] = [const {
    Slot {
        start: AtomicUsize::new(FREE),
        end: AtomicUsize::new(0),
        page: AtomicUsize::new(0),
        broken: AtomicBool::new(false),
    }
}; MAPPINGS_MAX];

/// What handled SIGBUS before us; set before our handler is installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapping under watch, until dropped.
#[derive(Debug)]
pub(crate) struct Watch(&'static Slot);

impl Watch {
    /// Puts `len` bytes at `start`, made of pages of `page` bytes, under watch.
    ///
    /// # Errors
    /// [`Error::MappingCount`] if the table is full, [`Error::System`] if the handler cannot be installed.
    ///
    /// # Safety
    /// The range is a mapping of whole pages, reached only as memory that may change at any time, and not unmapped
    /// before the watch is dropped.
    pub(crate) unsafe fn new(start: NonNull<u8>, len: usize, page: usize) -> Result<Self, Error> {
        install()?;
        let claim =
            |slot: &&Slot| slot.start.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let slot = SLOTS.iter().find(claim).ok_or(Error::MappingCount { max: MAPPINGS_MAX })?;
        let start = start.as_ptr().expose_provenance();
        slot.end.store(start + len, Ordering::Relaxed);
        slot.page.store(page, Ordering::Relaxed);
        slot.broken.store(false, Ordering::Relaxed);
        // Release: pairs with the Acquire in `Slot::find`, which must see the words above.
        slot.start.store(start, Ordering::Release);
        Ok(Self(slot))
    }

    /// Whether a part of the mapping had to be replaced.
    pub(crate) fn is_broken(&self) -> bool {
        self.0.broken.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of the next claim.
        self.0.start.store(FREE, Ordering::Release);
    }
}

impl Slot {
    /// From the first byte of the page that holds `address` to the end of the mapping, if it is this one.
    ///
    /// The slot of the mapping that faulted cannot change meanwhile, for the faulting thread keeps that mapping
    /// alive; others can, and are told by a `start` that is not the same before and after.
    fn find(&self, address: usize) -> Option<(usize, usize)> {
        let start = self.start.load(Ordering::Acquire);
        let (end, page) = (self.end.load(Ordering::Relaxed), self.page.load(Ordering::Relaxed));
        // Orders the loads above before the one below.
        fence(Ordering::Acquire);
        let stable = start > CLAIMED && start == self.start.load(Ordering::Relaxed);
        (stable && (start..end).contains(&address)).then(|| (address - (address - start) % page, end))
    }
}

/// Installs the handler, once per process.
fn install() -> Result<(), Error> {
    /// The errno of the one attempt, 0 for success.
    static OUTCOME: OnceLock<i32> = OnceLock::new();
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    let outcome = *OUTCOME.get_or_init(|| {
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: asks for the present action only, to be written over `previous`.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr()) } != 0 {
            return errno();
        }
        // SAFETY: zeroed, then filled by the kernel.
        let previous = PREVIOUS.get_or_init(|| unsafe { previous.assume_init() });
        let mut action = *previous;
        action.sa_sigaction = on_sigbus as *const () as usize;
        // ONSTACK: a fault may come with little stack left.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `on_sigbus` has the signature that SA_SIGINFO asks for and does only what a signal handler may.
        match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
            0 => 0,
            _ => errno(),
        }
    });
    match outcome {
        0 => Ok(()),
        errno => {
            Err(Error::System { step: "installing the SIGBUS handler", source: io::Error::from_raw_os_error(errno) })
        }
    }
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`; `si_addr` is defined for a SIGBUS that the kernel raised
    // (`si_code` > 0).
    let fault = unsafe { ((*info).si_code > 0).then(|| (*info).si_addr().addr()) };
    // SAFETY: errno is this thread's own; a handler has to leave it as it was.
    let errno = unsafe { *libc::__errno_location() };
    if !fault.is_some_and(repair) {
        pass_on(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Replaces the lost end of the mapping that holds `address` by zero pages. Async-signal-safe: atomics and `mmap` only.
fn repair(address: usize) -> bool {
    for slot in &SLOTS {
        let Some((from, end)) = slot.find(address) else { continue };
        // A file loses its end, not its middle: everything up to the end goes at once. That is one fault instead of
        // one a page, and at most one more entry in the kernel's list of mappings, however the peer plays with the
        // size.
        slot.broken.store(true, Ordering::Relaxed);
        // SAFETY: `Watch::new`'s contract: whole pages of a mapping that stays while the faulting thread uses it,
        // holding data that may change at any time; so zeros are as good as what the peer could have written.
        let mapped = unsafe {
            libc::mmap(
                ptr::with_exposed_provenance_mut(from),
                end - from,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        return mapped != libc::MAP_FAILED;
    }
    false
}

/// Lets the previous handler have the signal; without one, the default action strikes when the instruction repeats.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(previous) = PREVIOUS.get() else { return };
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restores what the kernel told us before.
            unsafe { libc::sigaction(signal, previous, ptr::null_mut()) };
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: with SA_SIGINFO, whoever registered the address vouched for this signature.
            unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) };
        }
        handler => {
            // SAFETY: without SA_SIGINFO, the signature is this one.
            unsafe { std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler)(signal) };
        }
    }
}
