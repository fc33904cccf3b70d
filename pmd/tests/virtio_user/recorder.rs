//! An independent backend, `vhost`'s own, that writes down every request.

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
};

/// What the backend offers, and what it was asked.
pub struct Recorder {
    pub offered: u64,
    pub protocol: VhostUserProtocolFeatures,
    pub queue_pairs: u64,
    /// A request to refuse.
    pub refused: &'static str,
    pub log: Vec<String>,
}

impl Recorder {
    /// Listens at `path` and serves one connection until it ends; what was asked is the thread's result.
    pub fn listen(self, path: &Path) -> JoinHandle<Vec<String>> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || self.serve(listener.accept().unwrap().0))
    }

    pub fn serve(self, stream: UnixStream) -> Vec<String> {
        let recorder = Arc::new(Mutex::new(self));
        let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&recorder));
        while handler.handle_request().is_ok() {}
        std::mem::take(&mut recorder.lock().unwrap().log)
    }

    fn note(&mut self, request: String) -> Result<()> {
        let refused = request.split(' ').next() == Some(self.refused);
        self.log.push(request);
        if refused { Err(Error::InvalidOperation("refused for the test")) } else { Ok(()) }
    }
}

impl VhostUserBackendReqHandlerMut for Recorder {
    fn set_owner(&mut self) -> Result<()> {
        self.note("SET_OWNER".to_owned())
    }
    fn get_features(&mut self) -> Result<u64> {
        self.note("GET_FEATURES".to_owned())?;
        Ok(self.offered)
    }
    fn set_features(&mut self, features: u64) -> Result<()> {
        self.note(format!("SET_FEATURES {features:#x}"))
    }
    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        self.note("GET_PROTOCOL_FEATURES".to_owned())?;
        Ok(self.protocol)
    }
    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.note(format!("SET_PROTOCOL_FEATURES {features:#x}"))
    }
    fn get_queue_num(&mut self) -> Result<u64> {
        self.note("GET_QUEUE_NUM".to_owned())?;
        Ok(self.queue_pairs)
    }
    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let mut request = "SET_MEM_TABLE".to_owned();
        for (region, file) in regions.iter().zip(files) {
            let (gpa, user, offset, size) =
                (region.guest_phys_addr, region.user_addr, region.mmap_offset, region.memory_size);
            let in_file = file.metadata().unwrap().len() == size;
            let line = format!(" gpa {gpa:#x} user {user:#x} offset {offset} size {size} in file {in_file}");
            request.push_str(&line);
        }
        self.note(request).map(|()| None)
    }
    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.note(format!("SET_VRING_NUM {index} {num}"))
    }
    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        desc: u64,
        used: u64,
        avail: u64,
        _log: u64,
    ) -> Result<()> {
        self.note(format!(
            "SET_VRING_ADDR {index} flags {} desc {desc:#x} avail {avail:#x} used {used:#x}",
            flags.bits()
        ))
    }
    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.note(format!("SET_VRING_BASE {index} {base:#x}"))
    }
    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.note(format!("GET_VRING_BASE {index}"))?;
        Ok(VhostUserVringState::new(index, 0x8123_8456 + index))
    }
    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.note(format!("SET_VRING_KICK {index} fd {}", file.is_some()))
    }
    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.note(format!("SET_VRING_CALL {index} fd {}", file.is_some()))
    }
    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.note(format!("SET_VRING_ENABLE {index} {enable}"))
    }

    // What the front-end has no business asking.
    fn reset_owner(&mut self) -> Result<()> {
        self.note("RESET_OWNER".to_owned())
    }
    fn reset_device(&mut self) -> Result<()> {
        self.note("RESET_DEVICE".to_owned())
    }
    fn set_vring_err(&mut self, _: u8, _: Option<File>) -> Result<()> {
        self.note("SET_VRING_ERR".to_owned())
    }
    fn get_config(&mut self, _: u32, _: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        Err(UNEXPECTED)
    }
    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(UNEXPECTED)
    }
    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(UNEXPECTED)
    }
    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(UNEXPECTED)
    }
    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        Err(UNEXPECTED)
    }
    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        Err(UNEXPECTED)
    }
    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Err(UNEXPECTED)
    }
    fn add_mem_region(&mut self, _: &VhostUserSingleMemoryRegion, _: File, _: Option<bool>) -> Result<Option<u64>> {
        Err(UNEXPECTED)
    }
    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(UNEXPECTED)
    }
    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(UNEXPECTED)
    }
    fn check_device_state(&mut self) -> Result<()> {
        Err(UNEXPECTED)
    }
    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(UNEXPECTED)
    }
    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(UNEXPECTED)
    }
}

const UNEXPECTED: Error = Error::InvalidOperation("no business of this front-end");
