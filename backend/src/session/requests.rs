//! A method per request, called by the `vhost` crate once it has parsed one.
use std::fs::File;
use std::io;
use std::sync::Arc;

use pmd::virtio::spec::RING_SIZE_MAX;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error as VhostError, GpuBackend, Result as VhostResult, VhostUserBackendReqHandlerMut};

use super::ring::{Addresses, Kick};
use super::{NET_CONFIG_LEN, Session};
use crate::error::Error;
use crate::inflight::{self, Inflight};
use crate::memory::{GuestMemory, REGIONS_MAX, RegionConfig};
use crate::queue::config::Notifier;

/// Size of the configuration space in bytes; what lies behind the device's own part reads as zeros.
const CONFIG_SPACE_LEN: usize = 256;

/// Never reached: `protocol.rs` passes supported requests only, and not those of `own.rs`.
const UNSUPPORTED: VhostError = VhostError::InvalidOperation("request not supported");

impl From<Error> for VhostError {
    fn from(error: Error) -> Self {
        VhostError::ReqHandlerError(io::Error::other(error))
    }
}

fn region_config(region: &VhostUserMemoryRegion, file: File) -> RegionConfig {
    RegionConfig {
        guest_phys_addr: region.guest_phys_addr,
        size: region.memory_size,
        user_addr: region.user_addr,
        mmap_offset: region.mmap_offset,
        file,
    }
}

fn notifier(index: u8, file: File) -> Result<Arc<Notifier>, Error> {
    Notifier::new(file).map(Arc::new).map_err(|_| Error::RingNotifier { index: index.into() })
}

fn check_offered(features: u64, offered: u64, kind: &'static str) -> Result<(), Error> {
    match features & !offered {
        0 => Ok(()),
        unknown => Err(Error::Features { features, unknown, kind }),
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> VhostResult<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> VhostResult<()> {
        self.reset();
        (self.memory, self.inflight) = (Arc::default(), None);
        Ok(())
    }

    fn reset_device(&mut self) -> VhostResult<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> VhostResult<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> VhostResult<()> {
        let running = self.rings.iter().any(|ring| ring.running);
        match self.features {
            Some(present) if running && present != features => {
                return Err(Error::FeaturesWhileRunning { features, present }.into());
            }
            Some(_) if running => return Ok(()),
            _ => {}
        }
        // Forgotten even if the new ones are refused: a device without features must not run.
        self.features = None;
        check_offered(features, self.offered(), "of the device")?;
        Ok(self.change_all(|session| session.features = Some(features))?)
    }

    fn get_protocol_features(&mut self) -> VhostResult<VhostUserProtocolFeatures> {
        Ok(offered_protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> VhostResult<()> {
        let offered = offered_protocol_features();
        check_offered(features, offered.bits(), "of the protocol")?;
        Ok(self.change_all(|session| {
            session.protocol_features = VhostUserProtocolFeatures::from_bits_truncate(features);
        })?)
    }

    fn get_queue_num(&mut self) -> VhostResult<u64> {
        // Pairs, as DPDK and QEMU understand it for a network device.
        Ok(self.rings.len() as u64 / 2)
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> VhostResult<Option<Vec<u64>>> {
        let configs: Vec<_> = regions.iter().zip(files).map(|(region, file)| region_config(region, file)).collect();
        let memory = GuestMemory::new(&configs)?;
        self.change_all(|session| session.memory = memory)?;
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> VhostResult<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> VhostResult<Option<u64>> {
        let memory = self.memory.with(&region_config(region, file))?;
        self.change_all(|session| session.memory = memory)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> VhostResult<()> {
        let memory = self.memory.without(region.guest_phys_addr, region.user_addr, region.memory_size)?;
        Ok(self.change_all(|session| session.memory = memory)?)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> VhostResult<()> {
        self.place(index)?;
        let packed = self.is_packed().unwrap_or(true);
        let size = u16::try_from(num)
            .ok()
            .filter(|size| (1..=RING_SIZE_MAX).contains(size) && (packed || size.is_power_of_two()))
            .ok_or(Error::RingSize { index, size: num })?;
        Ok(self.change(index, |ring| ring.size = Some(size))?)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        desc: u64,
        used: u64,
        avail: u64,
        _log: u64,
    ) -> VhostResult<()> {
        Ok(self.change(index, |ring| ring.addresses = Some(Addresses { desc, avail, used }))?)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> VhostResult<()> {
        let running = self.rings[self.place(index)?].running;
        Ok(self.change(index, |ring| {
            // It may come late, after all that a ring needs to run: a ring that has moved by then knows better.
            if !running || ring.began == Some(ring.position) {
                (ring.position, ring.began) = (base, None);
            }
        })?)
    }

    fn get_vring_base(&mut self, index: u32) -> VhostResult<VhostUserVringState> {
        Ok(VhostUserVringState::new(index, self.finish(index)?))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> VhostResult<()> {
        let kick = match file {
            Some(file) => Kick::Eventfd(notifier(index, file)?),
            None => Kick::Polled,
        };
        Ok(self.change(index.into(), |ring| ring.kick = kick)?)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> VhostResult<()> {
        let call = file.map(|file| notifier(index, file)).transpose()?;
        Ok(self.change(index.into(), |ring| ring.call = call)?)
    }

    fn set_vring_err(&mut self, index: u8, _file: Option<File>) -> VhostResult<()> {
        // Nothing is ever signalled there: a ring whose content is wrong drops frames and counts them.
        Ok(self.place(index.into()).map(drop)?)
    }

    fn set_vring_enable(&mut self, _index: u32, _enable: bool) -> VhostResult<()> {
        Err(UNSUPPORTED)
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> VhostResult<Vec<u8>> {
        let mut space = [0; CONFIG_SPACE_LEN];
        space[..NET_CONFIG_LEN].copy_from_slice(&self.device.config());
        let (start, len) = (offset as usize, size as usize);
        let outside = Error::ConfigRange { offset, size, max: CONFIG_SPACE_LEN };
        Ok(space.get(start..).and_then(|rest| rest.get(..len)).ok_or(outside)?.to_vec())
    }

    fn set_config(&mut self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> VhostResult<()> {
        Err(UNSUPPORTED)
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> VhostResult<()> {
        Err(UNSUPPORTED)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> VhostResult<File> {
        Err(UNSUPPORTED)
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> VhostResult<(VhostUserInflight, File)> {
        // Unless it is settled, the larger layout.
        Ok(inflight::create(self.is_packed().unwrap_or(true), asked, self.rings.len())?)
    }

    fn set_inflight_fd(&mut self, shape: &VhostUserInflight, file: File) -> VhostResult<()> {
        let inflight = Inflight::new(shape, &file, self.rings.len())?;
        Ok(self.change_all(|session| session.inflight = Some(inflight))?)
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> VhostResult<Option<File>> {
        Err(UNSUPPORTED)
    }

    fn check_device_state(&mut self) -> VhostResult<()> {
        Err(UNSUPPORTED)
    }

    fn get_shmem_config(&mut self) -> VhostResult<VhostUserShMemConfig> {
        Err(UNSUPPORTED)
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> VhostResult<()> {
        Err(UNSUPPORTED)
    }
}

/// The protocol features that this backend has (vhost-user, "Protocol features").
fn offered_protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::STATUS
}
