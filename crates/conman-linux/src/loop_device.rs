//! Loop devices: files as disks.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const CONTROL: &str = "/dev/loop-control";

/// Requests of linux/loop.h.
const GET_STATUS: libc::c_ulong = 0x4C05;
const UPDATE_SIZE: libc::c_ulong = 0x4C07;
const CONFIGURE: libc::c_ulong = 0x4C0A;
const GET_FREE: libc::c_ulong = 0x4C82;

/// `LO_FLAGS_AUTOCLEAR`: the kernel detaches the file when nothing uses the device any more.
const AUTOCLEAR: u32 = 4;

/// Attempts to get a free device: other programs take them, too.
const TRIES: u32 = 16;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Debug)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt: [u32; 2],
    flags: u32,
    names: [u8; 160],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct Config {
    file: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

impl Info {
    fn with_flags(flags: u32) -> Self {
        Self {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt: [0; 2],
            flags,
            names: [0; 160],
            init: [0; 2],
        }
    }
}

/// A file as a disk, until nothing uses it any more: no descriptor of it, no mount.
#[derive(Debug)]
pub struct LoopDevice {
    device: File,
    node: PathBuf,
}

impl LoopDevice {
    /// The device of a file, by which it is in use already, or a new one; Linux 5.8.
    pub fn attach(path: &Path) -> io::Result<Self> {
        if let Some(present) = Self::find(path)? {
            return Ok(present);
        }
        let control = File::options().read(true).write(true).open(CONTROL)?;
        let file = File::options().read(true).write(true).open(path)?;
        for _ in 0..TRIES {
            let number = request(&control, GET_FREE, &mut ())?;
            let device = Self::open(PathBuf::from(format!("/dev/loop{number}")))?;
            let mut config = Config {
                file: u32::try_from(file.as_raw_fd()).unwrap_or(u32::MAX),
                block_size: 0,
                info: Info::with_flags(AUTOCLEAR),
                reserved: [0; 8],
            };
            match request(&device.device, CONFIGURE, &mut config) {
                // Another program was faster.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                other => return other.map(|_| device),
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// The device of a file, if it has one.
    pub fn find(path: &Path) -> io::Result<Option<Self>> {
        let file = fs::metadata(path)?;
        for entry in fs::read_dir("/sys/block")?.flatten() {
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else {
                continue;
            };
            // That of another file is not opened: its owner may be about to detach it.
            let backing = fs::read_to_string(entry.path().join("loop/backing_file"));
            let backing = PathBuf::from(backing.unwrap_or_default().trim_end());
            if !name.starts_with("loop") || backing.file_name() != path.file_name() {
                continue;
            }
            let Ok(found) = Self::open(Path::new("/dev").join(name)) else {
                continue;
            };
            let mut info = Info::with_flags(0);
            let described = request(&found.device, GET_STATUS, &mut info);
            if described.is_ok() && (info.device, info.inode) == (file.dev(), file.ino()) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn open(node: PathBuf) -> io::Result<Self> {
        let device = File::options().read(true).write(true).open(&node)?;
        Ok(Self { device, node })
    }

    /// Its node in `/dev`.
    #[must_use]
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// Makes it as large as its file.
    pub fn update_size(&self) -> io::Result<()> {
        request(&self.device, UPDATE_SIZE, &mut ()).map(drop)
    }
}

#[expect(unsafe_code, reason = "these ioctls have no safe wrappers")]
fn request<T>(file: &File, request: libc::c_ulong, argument: &mut T) -> io::Result<i32> {
    // SAFETY: each request above is passed the struct that it is defined for, or is defined without one;
    // `argument` lives until it returns.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(argument)) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_to_the_kernel_has_its_sizes() {
        assert_eq!(size_of::<Info>(), 232);
        assert_eq!(size_of::<Config>(), 304);
    }

    #[test]
    fn an_ordinary_file_is_on_no_device() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(LoopDevice::find(file.path()).expect("looked for").is_none());
    }
}
