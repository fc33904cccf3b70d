//! What the kernel must be asked in C: on which CPUs a thread runs, and when the process shall end.
#![expect(unsafe_code, reason = "thin wrappers over libc calls that have no safe binding here")]

use std::io;
use std::mem::MaybeUninit;

/// Highest CPU number, plus one, that the kernel's fixed-size mask can name.
const CPUS_MAX: usize = libc::CPU_SETSIZE as usize;

/// The CPUs on which the calling thread may run, in ascending order.
///
/// # Errors
/// What `sched_getaffinity` says.
pub fn cpus_allowed() -> io::Result<Vec<usize>> {
    // SAFETY: a CPU mask is plain integers, for which zero is a value (the empty set).
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `mask` is live and as large as the size says; 0 is the calling thread.
    if unsafe { libc::sched_getaffinity(0, size_of_val(&mask), &raw mut mask) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: reads one bit inside the mask, for `cpu` is below `CPU_SETSIZE`.
    Ok((0..CPUS_MAX).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &mask) }).collect())
}

/// Keeps the calling thread on one CPU.
///
/// # Errors
/// What `sched_setaffinity` says; `InvalidInput` for a number the kernel's mask cannot hold.
pub fn pin_thread(cpu: usize) -> io::Result<()> {
    if cpu >= CPUS_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: as in `cpus_allowed`.
    let mut mask: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: sets one bit inside the mask, as checked above.
    unsafe { libc::CPU_SET(cpu, &mut mask) };
    // SAFETY: `mask` is live and as large as the size says; 0 is the calling thread.
    if unsafe { libc::sched_setaffinity(0, size_of_val(&mask), &raw const mask) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The signals that ask a process to end, Ctrl-C's SIGINT and SIGTERM, as something a thread can wait for.
#[derive(Clone, Copy)]
pub struct Termination {
    signals: libc::sigset_t,
}

impl Termination {
    /// Blocks both signals in the calling thread and in those it starts from now on, so that only [`wait`](Self::wait) sees
    /// them. To be called before the first thread is started.
    ///
    /// # Errors
    /// What `pthread_sigmask` says.
    pub fn block() -> io::Result<Self> {
        let mut signals = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initialises the set before anything else looks at it; the numbers are valid signals.
        let signals = unsafe {
            libc::sigemptyset(signals.as_mut_ptr());
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGINT);
            libc::sigaddset(signals.as_mut_ptr(), libc::SIGTERM);
            signals.assume_init()
        };
        // SAFETY: a live set; the old mask is not asked for.
        match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut()) } {
            0 => Ok(Self { signals }),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Waits until one of them arrives.
    ///
    /// # Errors
    /// What `sigwait` says.
    pub fn wait(&self) -> io::Result<()> {
        let mut signal = 0;
        // SAFETY: a live set and a live integer.
        match unsafe { libc::sigwait(&raw const self.signals, &raw mut signal) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_may_run_on_its_cpu_only() {
        let cpu = *cpus_allowed().unwrap().last().unwrap();
        let allowed = std::thread::spawn(move || pin_thread(cpu).and_then(|()| cpus_allowed())).join().unwrap();
        assert_eq!(allowed.unwrap(), [cpu]);
    }

    #[test]
    fn a_cpu_beyond_the_mask_is_an_error() {
        assert_eq!(pin_thread(CPUS_MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
