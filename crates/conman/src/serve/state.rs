use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use conman_core::Instance;
use conman_image::ImageStore;
use conman_proto::Generation;
use conman_registry::{EmbeddedOptions, EmbeddedRegistry, Journal, Registry};

use crate::config::Config;

/// File in the state directory that holds the installation's random id.
const INSTANCE_FILE: &str = "instance";
/// Directory of the image store in the state directory.
const IMAGES: &str = "images";

/// The state directory, held by this process alone.
pub(super) struct State {
    pub(super) registry: Arc<dyn Registry>,
    pub(super) journal: Arc<Journal>,
    pub(super) instance: Instance,
    pub(super) images: ImageStore,
}

impl State {
    /// Opens everything in the state directory. The registry comes first: its lock is what keeps
    /// a second daemon out, which must not touch anything.
    pub(super) fn open(config: &Config, generation_floor: Option<Generation>) -> Result<Self> {
        let directory = &config.state_dir;
        prepare(directory)?;
        let options = EmbeddedOptions { generation_floor };
        let registry =
            EmbeddedRegistry::open(directory, options).context("cannot open the registry")?;
        let journal = Journal::open(directory, &config.name, config.limits.max_events)
            .context("cannot open the journal of events")?;
        Ok(Self {
            registry: Arc::new(registry),
            journal: Arc::new(journal),
            instance: instance(directory)?,
            images: images(&directory.join(IMAGES), config)?,
        })
    }
}

/// The image store. Every guard of an image is taken by the runtime that uses it: by a start, or
/// as it adopts what runs, before the first collection.
fn images(directory: &Path, config: &Config) -> Result<ImageStore> {
    ImageStore::open(directory, config.images.limits.clone()).with_context(|| {
        format!(
            "cannot open the image store; when {} cannot be mended, move it away and import the \
             images again",
            directory.display()
        )
    })
}

/// Makes the state directory, or checks that nobody else could have put something into it.
fn prepare(directory: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .with_context(|| format!("cannot make the state directory {}", directory.display()))?;
    let metadata = fs::metadata(directory)
        .with_context(|| format!("cannot look at the state directory {}", directory.display()))?;
    let own = rustix::process::geteuid().as_raw();
    if metadata.uid() != own {
        bail!(
            "the state directory {} belongs to uid {} and conman runs as uid {own}; give it to \
             conman with chown, or name another one in `node.state_dir`",
            directory.display(),
            metadata.uid()
        );
    }
    if metadata.mode() & 0o077 != 0 {
        // Records name what runs here, and the key of connect tokens lies beside them.
        let private = fs::Permissions::from_mode(0o700);
        fs::set_permissions(directory, private)
            .with_context(|| format!("cannot keep others out of {}", directory.display()))?;
        tracing::warn!(
            "took everybody else's access to {} away",
            directory.display()
        );
    }
    Ok(())
}

/// The id that everything this installation makes bears; made at the first start.
fn instance(directory: &Path) -> Result<Instance> {
    let path = directory.join(INSTANCE_FILE);
    match fs::read_to_string(&path) {
        Ok(text) => Instance::parse(text.trim()).with_context(|| {
            format!(
                "{} does not hold an instance id; restore it, because containers are known by it",
                path.display()
            )
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => make_instance(&path),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn make_instance(path: &Path) -> Result<Instance> {
    let mut random = [0; 4];
    getrandom::fill(&mut random).context("cannot get random numbers for the instance id")?;
    let instance = Instance::new(random);
    let partial = path.with_extension("new");
    let write = || -> std::io::Result<()> {
        let mut options = fs::OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&partial)?;
        writeln!(file, "{}", instance.as_str())?;
        file.sync_all()?;
        fs::rename(&partial, path)?;
        // The name must be durable before any container bears the id.
        fs::File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
    };
    write().with_context(|| format!("cannot write {}", path.display()))?;
    Ok(instance)
}
