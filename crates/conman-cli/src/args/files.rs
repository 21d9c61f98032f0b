//! Arguments of the subcommands about files in sessions.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use conman_proto::SessionId;

/// Arguments of `conman cp`.
#[derive(Debug, Clone, Args)]
pub struct CpArgs {
    /// User in the session who reads, or writes and owns the copy; USER:GROUP allowed
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Directories are always copied with what they contain
    #[arg(short, long, short_alias = 'a', hide = true)]
    pub recursive: bool,
    /// A file or directory, ID:PATH in a session, or - for standard input
    #[arg(value_name = "SOURCE")]
    pub from: CopyEnd,
    /// A path, into which it is copied if it is a directory; ID:PATH in a session, or - for standard
    /// output. A directory is a tar archive on standard input and output
    #[arg(value_name = "TARGET")]
    pub to: CopyEnd,
}

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyEnd {
    /// Standard input or output.
    Standard,
    Local(PathBuf),
    Session(SessionId, String),
}

impl FromStr for CopyEnd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            _ if text == "-" => Ok(Self::Standard),
            // A local path with a colon is written with a slash before it.
            Some((id, path)) if !id.contains('/') => {
                let id = id.parse::<SessionId>().map_err(|error| error.to_string())?;
                match path {
                    "" => Err(format!("give a path, for example {id}:/tmp")),
                    path => Ok(Self::Session(id, path.to_owned())),
                }
            }
            _ => Ok(Self::Local(text.into())),
        }
    }
}

/// Arguments of `conman ls`.
#[derive(Debug, Clone, Args)]
pub struct LsArgs {
    /// User in the session whose rights count
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Print names only
    #[arg(short, long)]
    pub quiet: bool,
    /// A session, and a directory in it; / unless given
    #[arg(value_name = "ID[:PATH]")]
    pub directory: DirectoryAddress,
}

/// Arguments of `conman watch`.
#[derive(Debug, Clone, Args)]
pub struct WatchArgs {
    /// User in the session whose rights count
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// A session, and a directory or file in it; / unless given
    #[arg(value_name = "ID[:PATH]")]
    pub path: DirectoryAddress,
}

/// A directory of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryAddress {
    pub id: SessionId,
    pub path: String,
}

impl FromStr for DirectoryAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (id, path) = text.split_once(':').unwrap_or((text, "/"));
        let id = id.parse::<SessionId>().map_err(|error| error.to_string())?;
        let path = if path.is_empty() { "/" } else { path };
        Ok(Self {
            id,
            path: path.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_before_a_colon_is_a_sessions_unless_a_slash_comes_first() {
        let id = || "alice".parse().expect("an id");
        for (text, expected) in [
            ("-", CopyEnd::Standard),
            ("file", CopyEnd::Local("file".into())),
            ("./a:b", CopyEnd::Local("./a:b".into())),
            ("alice:/tmp", CopyEnd::Session(id(), "/tmp".to_owned())),
            ("alice:a:b", CopyEnd::Session(id(), "a:b".to_owned())),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        assert!("alice:".parse::<CopyEnd>().is_err());
        assert!("Alice:/tmp".parse::<CopyEnd>().is_err());
        let all: DirectoryAddress = "alice".parse().expect("valid");
        assert_eq!((all.id, all.path.as_str()), (id(), "/"));
    }
}
