//! Images of several layers, made by chance, and the trees that they mean: as overlayfs shows the store's layers, and
//! as Docker Engine has them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use conman_image::Digest;
use tar::EntryType;

use crate::support::private_mounts::{inside, mount};
use crate::support::{Stage, Tar, lacks, name};

/// One image for each.
const SEEDS: std::ops::Range<u64> = 1..17;
/// So many of them are given to Docker Engine, which takes a second for each.
const WITH_DOCKER: u64 = 4;

const LAYERS: usize = 4;
const STEPS: usize = 14;

/// What paths consist of.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const MOST_DEPTH: u64 = 3;
const OWNERS: [u64; 3] = [0, 1_000, 65_535];
const FILE_MODES: [u32; 4] = [0o644, 0o600, 0o755, 0o4755];
const DIRECTORY_MODES: [u32; 3] = [0o755, 0o700, 0o1777];

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Directory,
    File(String),
    Symlink(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Node {
    kind: Kind,
    owner: u64,
    /// 0 for a symbolic link.
    mode: u32,
}

/// By paths without a leading slash.
type Tree = BTreeMap<String, Node>;

/// An entry of a layer.
#[derive(Debug)]
enum Entry {
    Put(String, Node),
    /// A hard link to this file of the same layer.
    Link(String, String, Node),
    Whiteout(String),
    Opaque(String),
}

struct Chance(u64);

impl Chance {
    /// Below `bound`, by xorshift.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    fn of<T: Clone>(&mut self, from: &[T]) -> T {
        let index = usize::try_from(self.below(from.len() as u64)).expect("small");
        from[index].clone()
    }

    fn path(&mut self) -> String {
        let depth = 1 + self.below(MOST_DEPTH);
        let names: Vec<&str> = (0..depth).map(|_| self.of(&NAMES)).collect();
        names.join("/")
    }

    fn node(&mut self, kind: Kind) -> Node {
        let mode = match kind {
            Kind::Directory => self.of(&DIRECTORY_MODES),
            Kind::File(_) => self.of(&FILE_MODES),
            Kind::Symlink(_) => 0,
        };
        let owner = self.of(&OWNERS);
        Node { kind, owner, mode }
    }
}

fn is_below(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory)
        .is_some_and(|rest| rest.starts_with('/'))
}

/// The directories above a path, the outermost first.
fn above(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(end, _)| &path[..end])
}

/// Everything that a path of a layer does to the tree of the layers below. `own`: paths of this layer before it.
fn apply(entry: &Entry, tree: &mut Tree, own: &mut BTreeSet<String>) {
    match entry {
        Entry::Put(path, node) => {
            let was_directory = tree
                .get(path)
                .is_some_and(|node| node.kind == Kind::Directory);
            if !was_directory || node.kind != Kind::Directory {
                tree.retain(|known, _| !is_below(known, path));
            }
            tree.insert(path.clone(), node.clone());
            own.insert(path.clone());
        }
        Entry::Link(path, _, node) => {
            tree.retain(|known, _| !is_below(known, path));
            tree.insert(path.clone(), node.clone());
            own.insert(path.clone());
        }
        Entry::Whiteout(path) => tree.retain(|known, _| known != path && !is_below(known, path)),
        Entry::Opaque(path) => {
            tree.retain(|known, _| !is_below(known, path) || own.contains(known))
        }
    }
}

/// A layer that is being made. It names each path once, and no path at or below a whiteout: there tools differ.
struct Draft<'a> {
    lower: &'a Tree,
    tree: Tree,
    entries: Vec<Entry>,
    own: BTreeSet<String>,
    removed: BTreeSet<String>,
}

impl Draft<'_> {
    /// If so, nothing below it is named either.
    fn is_free(&self, path: &str) -> bool {
        let is_named = |path: &str| self.own.contains(path) || self.removed.contains(path);
        let is_blocked = |path: &str| is_named(path) && !is_directory(&self.tree, path);
        !is_named(path) && !above(path).any(is_blocked)
    }

    /// Names the directories above a path first, as tools do.
    fn add(&mut self, path: &str, entry: Entry, chance: &mut Chance) {
        for directory in above(path) {
            if self.own.contains(directory) {
                continue;
            }
            let node = match self.tree.get(directory) {
                Some(node) if node.kind == Kind::Directory => node.clone(),
                _ => chance.node(Kind::Directory),
            };
            self.push(Entry::Put(directory.to_owned(), node));
        }
        self.push(entry);
    }

    fn push(&mut self, entry: Entry) {
        apply(&entry, &mut self.tree, &mut self.own);
        self.entries.push(entry);
    }

    fn step(&mut self, chance: &mut Chance) {
        let path = chance.path();
        let content = chance.below(1_000).to_string();
        let kind = chance.below(7);
        if !self.is_free(&path) {
            return;
        }
        let entry = match kind {
            0 if self.lower.contains_key(&path) && self.tree.contains_key(&path) => {
                self.removed.insert(path.clone());
                Entry::Whiteout(path.clone())
            }
            1 if is_directory(self.lower, &path) && is_directory(&self.tree, &path) => {
                let node = self.tree[&path].clone();
                self.add(&path, Entry::Put(path.clone(), node), chance);
                Entry::Opaque(path.clone())
            }
            2 => {
                let is_file = |path: &&String| matches!(self.tree[*path].kind, Kind::File(_));
                let files: Vec<String> = self.own.iter().filter(is_file).cloned().collect();
                if files.is_empty() {
                    return;
                }
                let target = chance.of(&files);
                let node = self.tree[&target].clone();
                Entry::Link(path.clone(), target, node)
            }
            3 => Entry::Put(path.clone(), chance.node(Kind::Directory)),
            4 => {
                let node = chance.node(Kind::Symlink(format!("../{content}")));
                Entry::Put(path.clone(), node)
            }
            _ => Entry::Put(path.clone(), chance.node(Kind::File(content))),
        };
        self.add(&path, entry, chance);
    }
}

fn is_directory(tree: &Tree, path: &str) -> bool {
    tree.get(path)
        .is_some_and(|node| node.kind == Kind::Directory)
}

fn layer(lower: &Tree, chance: &mut Chance) -> Vec<Entry> {
    let mut draft = Draft {
        lower,
        tree: lower.clone(),
        entries: Vec::new(),
        own: BTreeSet::new(),
        removed: BTreeSet::new(),
    };
    for _ in 0..STEPS {
        draft.step(chance);
    }
    draft.entries
}

fn archive(layer: &[Entry]) -> Vec<u8> {
    let marked = |path: &str, mark: &str| match path.rsplit_once('/') {
        Some((directory, name)) => format!("{directory}/{mark}{name}"),
        None => format!("{mark}{path}"),
    };
    let add = |archive: Tar, (kind, path, target, data), node: &Node| {
        archive.entry(kind, path, target, str::as_bytes(data), |header| {
            header.set_mode(node.mode);
            header.set_uid(node.owner);
            header.set_gid(node.owner);
        })
    };
    let archive = layer.iter().fold(Tar::new(), |archive, entry| match entry {
        Entry::Whiteout(path) => archive.file(marked(path, ".wh."), b""),
        Entry::Opaque(path) => archive.file(format!("{path}/.wh..wh..opq"), b""),
        // With what its target has, as in archives of tools.
        Entry::Link(path, target, node) => {
            add(archive, (EntryType::Link, &**path, &**target, ""), node)
        }
        Entry::Put(path, node) => {
            let (kind, target, data) = match &node.kind {
                Kind::Directory => (EntryType::Directory, "", ""),
                Kind::File(content) => (EntryType::Regular, "", &**content),
                Kind::Symlink(target) => (EntryType::Symlink, &**target, ""),
            };
            add(archive, (kind, &**path, target, data), node)
        }
    });
    archive.bytes()
}

/// An image as `docker save` writes it, and its tree.
fn image(seed: u64) -> (Vec<u8>, Tree) {
    let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut tree = Tree::new();
    let mut layers: Vec<Vec<Entry>> = Vec::new();
    let grow = |tree: &mut Tree, layer: &[Entry]| {
        let mut own = BTreeSet::new();
        for entry in layer {
            apply(entry, tree, &mut own);
        }
    };
    for _ in 0..LAYERS {
        let layer = layer(&tree, &mut chance);
        grow(&mut tree, &layer);
        layers.push(layer);
    }
    let mut archives: Vec<Vec<u8>> = layers.iter().map(|layer| archive(layer)).collect();
    if seed.is_multiple_of(2) {
        // The same layer once more.
        grow(&mut tree, &layers[0]);
        archives.push(archives[0].clone());
    }
    let ids: Vec<String> = archives
        .iter()
        .map(|layer| Digest::of(layer).to_string())
        .collect();
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["none"]},
        "rootfs": {"type": "layers", "diff_ids": ids},
    });
    let names: Vec<String> = (0..archives.len())
        .map(|number| format!("{number}/layer.tar"))
        .collect();
    let config = config.to_string();
    let config_name = format!("{}.json", Digest::of(config.as_bytes()).hex());
    let manifest = serde_json::json!([
        {"Config": config_name, "RepoTags": [tag(seed)], "Layers": names}
    ]);
    let saved = Tar::new()
        .file(&config_name, config.as_bytes())
        .file("manifest.json", manifest.to_string().as_bytes());
    let saved = names
        .iter()
        .zip(&archives)
        .fold(saved, |saved, (name, layer)| saved.file(name, layer));
    (saved.bytes(), tree)
}

fn tag(seed: u64) -> String {
    format!("conman-test-layers:{seed}")
}

/// What is below a directory.
fn tree_of(root: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut pending = vec![root.to_owned()];
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(&directory).expect("listed") {
            let path = entry.expect("an entry").path();
            let metadata = fs::symlink_metadata(&path).expect("metadata");
            let kind = if metadata.is_dir() {
                pending.push(path.clone());
                Kind::Directory
            } else if metadata.is_symlink() {
                let target = fs::read_link(&path).expect("a link");
                Kind::Symlink(target.to_string_lossy().into_owned())
            } else {
                Kind::File(fs::read_to_string(&path).expect("read"))
            };
            let mode = match kind {
                Kind::Symlink(_) => 0,
                _ => metadata.mode() & 0o7777,
            };
            assert_eq!(metadata.uid(), metadata.gid(), "{}", path.display());
            let owner = metadata.uid().into();
            let path = path.strip_prefix(root).expect("below");
            tree.insert(
                path.to_string_lossy().into_owned(),
                Node { kind, owner, mode },
            );
        }
    }
    tree
}

fn docker(arguments: &[&str]) -> Option<Vec<u8>> {
    let output = Command::new("docker")
        .args(arguments)
        .stderr(Stdio::inherit())
        .output();
    let output = output.ok()?;
    output.status.success().then_some(output.stdout)
}

/// The files of the image in Docker Engine, without those that it adds.
fn tree_in_docker(archive: &Path, tag: &str) -> Option<Tree> {
    docker(&["load", "--quiet", "--input", archive.to_str()?])?;
    let container = String::from_utf8(docker(&["create", tag])?).ok()?;
    let exported = docker(&["export", container.trim()]);
    docker(&["rm", container.trim()])?;
    docker(&["rmi", tag])?;
    let mut tree = Tree::new();
    for entry in tar::Archive::new(&*exported?).entries().ok()? {
        let mut entry = entry.ok()?;
        let path = entry
            .path()
            .ok()?
            .to_string_lossy()
            .trim_end_matches('/')
            .to_owned();
        if !NAMES
            .iter()
            .any(|name| path == *name || is_below(&path, name))
        {
            continue;
        }
        let target = || Some(entry.link_name().ok()??.to_string_lossy().into_owned());
        let kind = match entry.header().entry_type() {
            EntryType::Directory => Kind::Directory,
            EntryType::Symlink => Kind::Symlink(target()?),
            EntryType::Link => {
                let node = tree.get(&target()?)?.clone();
                tree.insert(path, node);
                continue;
            }
            _ => {
                let mut content = String::new();
                entry.read_to_string(&mut content).ok()?;
                Kind::File(content)
            }
        };
        let mode = match kind {
            Kind::Symlink(_) => 0,
            _ => entry.header().mode().ok()? & 0o7777,
        };
        let owner = entry.header().uid().ok()?;
        tree.insert(path, Node { kind, owner, mode });
    }
    Some(tree)
}

#[test]
fn layers_mean_the_same_tree_to_the_store_as_to_docker_engine() {
    if !inside("layered_images::layers_mean_the_same_tree_to_the_store_as_to_docker_engine") {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let (merged, nothing) = (stage.path().join("merged"), stage.path().join("nothing"));
    fs::create_dir(&merged).expect("a mount point");
    fs::create_dir(&nothing).expect("a directory");
    for seed in SEEDS {
        let (saved, right) = image(seed);
        let path = stage.file("saved.tar", &saved);
        let image = store.import(&path, &name(&tag(seed))).expect("imported");
        let layers = image.lower_directories().into_iter().chain([&*nothing]);
        let layers: Vec<String> = layers.map(|layer| layer.display().to_string()).collect();
        let layers = format!("lowerdir={}", layers.join(":"));
        mount(&["-t", "overlay", "-o", &layers, "overlay"], &merged);
        let found = tree_of(&merged);
        let unmounted = Command::new("umount").arg(&merged).status();
        assert!(unmounted.expect("umount runs").success());
        assert_eq!(found, right, "seed {seed}");
        if seed <= WITH_DOCKER {
            match tree_in_docker(&path, &tag(seed)) {
                Some(found) => assert_eq!(found, right, "Docker, seed {seed}"),
                None => lacks("docker cannot load an image"),
            }
        }
    }
}
