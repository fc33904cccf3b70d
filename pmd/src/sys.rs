//! What the kernel must be asked in C: on which CPUs a thread runs, how many descriptors a process may have, and when it shall
//! end.
#![expect(unsafe_code, reason = "thin wrappers over libc calls that have no safe binding here")]

use std::io::{self, PipeReader, Read};
use std::mem::MaybeUninit;
use std::os::fd::IntoRawFd;
use std::sync::atomic::{AtomicI32, Ordering};

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

/// How many file descriptors this process may have open (`ulimit -n`).
///
/// # Errors
/// What `getrlimit` says.
pub fn descriptors_max() -> io::Result<u64> {
    descriptor_limits().map(|limits| limits.rlim_cur)
}

/// Lets this process have as many file descriptors open as it may allow itself: two for each queue, which is soon more than the
/// usual 1024. Returns how many.
///
/// # Errors
/// What `getrlimit` or `setrlimit` says.
pub fn raise_descriptors_max() -> io::Result<u64> {
    let mut limits = descriptor_limits()?;
    limits.rlim_cur = limits.rlim_max;
    // SAFETY: `limits` is live and initialised; nothing here keeps a descriptor's number in less than an `int`.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limits) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limits.rlim_cur)
}

fn descriptor_limits() -> io::Result<libc::rlimit> {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limits` is live and of the type that is filled in.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limits)
}

/// Ctrl-C's, the one that asks politely, and that of a terminal which is closed.
const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// Where the signal handler writes to.
static NOTIFY: AtomicI32 = AtomicI32::new(-1);

/// The signals that ask a process to end, Ctrl-C's SIGINT, SIGTERM and SIGHUP, as something a thread can wait for.
pub struct Termination {
    pipe: PipeReader,
}

impl Termination {
    /// Catches these signals, for good: whichever thread they hit, [`wait`](Self::wait) sees them. They do not hit the calling
    /// thread and those it starts from now on, so none of its calls is interrupted. A second call takes them over from the
    /// first.
    ///
    /// # Errors
    /// What `pipe`, `sigaction` or `pthread_sigmask` says.
    pub fn catch() -> io::Result<Self> {
        let (pipe, writer) = io::pipe()?;
        // Never closed, for the handler may be about to write to it.
        NOTIFY.store(writer.into_raw_fd(), Ordering::Relaxed);
        let handler: extern "C" fn(libc::c_int) = notify;
        // SAFETY: a `sigaction` is plain integers, for which zero is a value (no flags, an empty mask).
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        for signal in SIGNALS {
            // SAFETY: a live action; its handler does what a handler may do, see `notify`.
            if unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        mask(libc::SIG_BLOCK)?;
        Ok(Self { pipe })
    }

    /// Waits until one of them arrives, or has arrived since the last time. From now on they may hit the calling thread.
    ///
    /// # Errors
    /// What `pthread_sigmask`, or reading a pipe, says.
    pub fn wait(&self) -> io::Result<()> {
        mask(libc::SIG_UNBLOCK)?;
        (&self.pipe).read_exact(&mut [0])
    }
}

/// Blocks or unblocks these signals in the calling thread.
fn mask(how: libc::c_int) -> io::Result<()> {
    let mut signals = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set before anything else looks at it; the numbers are valid signals; the old mask is
    // not asked for.
    let error = unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        for signal in SIGNALS {
            libc::sigaddset(signals.as_mut_ptr(), signal);
        }
        libc::pthread_sigmask(how, signals.as_ptr(), std::ptr::null_mut())
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// Tells the waiting thread. Only what `signal-safety(7)` lists: an atomic load and `write`, with `errno` as it was.
extern "C" fn notify(_: libc::c_int) {
    // SAFETY: `errno` is the thread's own; `write` gets one live byte, and any descriptor will do: -1 is only refused.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(NOTIFY.load(Ordering::Relaxed), c"".as_ptr().cast(), 1);
        *libc::__errno_location() = errno;
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
    fn a_signal_ends_the_wait_whichever_thread_it_hits() {
        let termination = Termination::catch().unwrap();
        // SAFETY: to ourselves, and the signal is caught.
        unsafe { libc::kill(std::process::id().cast_signed(), libc::SIGTERM) };
        termination.wait().unwrap();
    }

    #[test]
    fn a_cpu_beyond_the_mask_is_an_error() {
        assert_eq!(pin_thread(CPUS_MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
