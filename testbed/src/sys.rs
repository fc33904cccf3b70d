//! What a test needs to prove that a thread neither allocates nor enters the kernel.
#![expect(unsafe_code, reason = "a global allocator is an unsafe trait, and seccomp has no safe binding here")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io;

/// What kills a process that makes a call which it [may not](forbid_system_calls).
pub use libc::SIGSYS;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, which counts what each thread allocates: for `#[global_allocator]`.
#[derive(Debug)]
pub struct CountingAllocator;

impl CountingAllocator {
    /// Allocations by the calling thread so far.
    #[must_use]
    pub fn count() -> u64 {
        ALLOCATIONS.get()
    }

    fn tick() {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
    }
}

// SAFETY: all four are the system allocator's; counting touches a constant-initialised thread-local without a destructor, which
// never allocates.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::tick();
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::tick();
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::tick();
        // SAFETY: as in `alloc`.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// From now on any system call of the calling thread but [`exit`] kills the process, with SIGSYS; for good. (seccomp's strict
/// mode would let `write` pass, and with it the wake-up of a peer.)
///
/// # Errors
/// What `prctl` says.
pub fn forbid_system_calls() -> io::Result<()> {
    let exit = libc::SYS_exit_group as u32;
    // SAFETY: these only fill in a struct.
    let mut filter = unsafe {
        [
            // The call's number comes first in `struct seccomp_data`.
            libc::BPF_STMT((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0),
            libc::BPF_JUMP((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, exit, 0, 1),
            libc::BPF_STMT((libc::BPF_RET | libc::BPF_K) as u16, libc::SECCOMP_RET_ALLOW),
            libc::BPF_STMT((libc::BPF_RET | libc::BPF_K) as u16, libc::SECCOMP_RET_KILL_PROCESS),
        ]
    };
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: plain numbers; the kernel copies the live program that the pointer leads to.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) < 0
    };
    if refused { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Ends the process at once: no destructor runs, nothing is flushed, and `exit_group` is the only system call.
pub fn exit(code: i32) -> ! {
    // SAFETY: ends the process; what it leaves behind is the kernel's.
    unsafe { libc::_exit(code) }
}
