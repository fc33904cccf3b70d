//! The process-wide limit of mappings; alone in its process, because it uses them all.
mod support;

use backend::error::Error;
use backend::memory::{GuestMemory, REGIONS_MAX, RegionConfig};
use support::{PAGE, memfd};

#[test]
fn too_many_mappings_are_refused_and_released_ones_are_used_again() {
    let file = memfd(PAGE);
    let region = |i: usize| RegionConfig {
        guest_phys_addr: i as u64 * PAGE,
        size: PAGE,
        user_addr: i as u64 * PAGE,
        mmap_offset: 0,
        file: file.try_clone().unwrap(),
    };
    let table: Vec<_> = (0..REGIONS_MAX).map(region).collect();
    let mut guests = Vec::new();
    let error = loop {
        match GuestMemory::new(&table) {
            Ok(memory) => guests.push(memory),
            Err(error) => break error,
        }
        assert!(guests.len() <= 1024);
    };
    assert!(matches!(error, Error::MappingCount { max: 1024 }), "{error}");
    assert_eq!(guests.len(), 1024 / REGIONS_MAX);
    guests.pop();
    GuestMemory::new(&table).unwrap();
}
