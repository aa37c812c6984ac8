//! Watches the paths of the service's sockets: whoever removes one keeps everybody from connecting.
//! Those who are connected notice nothing of it.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mccs_runtime::{Context, Engine, Progress};

/// How often paths are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);

struct Watched {
    path: PathBuf,
    /// Inode when the service began to listen; `None` if that could not be seen.
    inode: Option<u64>,
    is_in_place: bool,
}

/// See the module's documentation.
#[derive(Default)]
pub struct SocketWatch {
    sockets: Vec<Watched>,
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|metadata| metadata.ino())
}

impl SocketWatch {
    /// Watches a socket, which is there.
    pub fn add(&mut self, path: &Path) {
        self.sockets.push(Watched { path: path.to_owned(), inode: inode(path), is_in_place: true });
    }

    /// Sockets that have just gone, or come back.
    fn look(&mut self) -> impl Iterator<Item = (&Path, bool)> {
        self.sockets.iter_mut().filter_map(|watched| {
            let is_in_place = watched.inode.is_none() || inode(&watched.path) == watched.inode;
            let is_news = std::mem::replace(&mut watched.is_in_place, is_in_place) != is_in_place;
            is_news.then_some((watched.path.as_path(), is_in_place))
        })
    }
}

impl Engine for SocketWatch {
    fn name(&self) -> String {
        "socket watch".into()
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        for (path, is_in_place) in self.look() {
            let path = path.display();
            if is_in_place {
                tracing::info!(%path, "the socket is in its place again");
            } else {
                tracing::error!(%path, "the socket has been removed or replaced: nobody can connect there until the service starts anew");
            }
        }
        Progress::Idle { wake_at: Some(cx.now + LOOK_EVERY) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_goes_is_news_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let [stays, goes] = ["stays", "goes"].map(|name| folder.path().join(name));
        let mut watch = SocketWatch::default();
        for path in [&stays, &goes] {
            std::fs::write(path, "").expect("a file");
            watch.add(path);
        }
        assert_eq!(watch.look().count(), 0);
        let aside = folder.path().join("aside");
        std::fs::rename(&goes, &aside).expect("renamed");
        assert_eq!(watch.look().collect::<Vec<_>>(), [(goes.as_path(), false)]);
        std::fs::write(&goes, "").expect("another file");
        assert_eq!(watch.look().count(), 0, "another's file is none of ours");
        std::fs::rename(&aside, &goes).expect("renamed");
        assert_eq!(watch.look().collect::<Vec<_>>(), [(goes.as_path(), true)]);
    }
}
