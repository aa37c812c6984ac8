//! Makes trial keys (`mccsctl keys`): an authority, and for each host a certificate that it signed.
//!
//! For tests, experiments and the launcher. An operator with an authority already uses that: all that a service wants of a
//! certificate is that its subject alternative name is the host's.
//!
//! Deliberately absent: the authority's key. It is forgotten when all hosts have theirs, so nobody can find it; to add a host,
//! make all keys anew.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

use super::protocol::Name;
use super::tls::TlsFiles;

/// How long the keys are good for.
pub const VALID_DAYS: i64 = 365;
/// Clocks of hosts may differ by so much.
const CLOCKS_DIFFER: Duration = Duration::days(1);

/// Why there are no keys.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A file is there already.
    #[error("{} exists; to make all keys anew, say --force", .0.display())]
    Exists(PathBuf),
    /// A file cannot be written.
    #[error("cannot write {}: {source}", .path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A name that no certificate can have.
    #[error("{0:?} cannot be a host's name: {1}")]
    Name(String, String),
    /// Named twice.
    #[error("host {0} is named twice")]
    Twice(String),
    /// No hosts, or the library's refusal.
    #[error("cannot make keys: {0}")]
    Make(String),
}

/// The files of a host in a directory of keys.
#[must_use]
pub fn files(directory: &Path, host: &str) -> TlsFiles {
    TlsFiles {
        certificate: directory.join(format!("{host}.crt")),
        key: directory.join(format!("{host}.key")),
        authority: directory.join("authority.crt"),
    }
}

/// A file of a set of keys.
pub struct KeyFile {
    /// Its name: see [`files`].
    pub name: String,
    /// Its content.
    pub pem: String,
    /// Whether only its owner may read it.
    pub is_private: bool,
}

/// An authority, and a certificate and a key for each host, in memory.
///
/// # Errors
/// [`KeysError`], of names.
pub fn generate(hosts: &[impl AsRef<str>]) -> Result<Vec<KeyFile>, KeysError> {
    check_names(hosts)?;
    sign(hosts).map_err(|error| KeysError::Make(error.to_string()))
}

/// Makes what [`generate`] does, in `directory`. Only who calls can read the keys. Files that are there are replaced only if `force` says so, and all or none are written unless the disk fails.
///
/// # Errors
/// [`KeysError`].
pub fn make(hosts: &[impl AsRef<str>], directory: &Path, force: bool) -> Result<(), KeysError> {
    let texts = generate(hosts)?;
    let failed = |path: &Path, source| KeysError::Write { path: path.to_owned(), source };
    let mut maker = DirBuilder::new();
    maker.recursive(true).mode(0o700).create(directory).map_err(|source| failed(directory, source))?;
    let texts: Vec<_> = texts.into_iter().map(|text| (directory.join(&text.name), text)).collect();
    if let Some((path, _)) = texts.iter().find(|(path, _)| !force && path.symlink_metadata().is_ok()) {
        return Err(KeysError::Exists(path.clone()));
    }
    for (path, text) in texts {
        write(&path, &text).map_err(|source| failed(&path, source))?;
    }
    Ok(())
}

fn check_names(hosts: &[impl AsRef<str>]) -> Result<(), KeysError> {
    if hosts.is_empty() {
        return Err(KeysError::Make("no hosts are named".into()));
    }
    for (at, host) in hosts.iter().map(AsRef::as_ref).enumerate() {
        let problem = |what: &str| Err(KeysError::Name(host.to_owned(), what.to_owned()));
        if Name::new(host).is_none() || host.contains('/') || host.starts_with('.') {
            return problem("it must be a DNS name of at most 64 characters");
        }
        if host == "authority" {
            return problem("the authority's certificate is called so");
        }
        if hosts.iter().take(at).any(|other| other.as_ref() == host) {
            return Err(KeysError::Twice(host.to_owned()));
        }
    }
    Ok(())
}

fn params(names: Vec<String>, common_name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    let now = OffsetDateTime::now_utc();
    params.not_before = now - CLOCKS_DIFFER;
    params.not_after = now + Duration::days(VALID_DAYS);
    Ok(params)
}

fn sign(hosts: &[impl AsRef<str>]) -> Result<Vec<KeyFile>, rcgen::Error> {
    let mut of_authority = params(Vec::new(), "mccs test authority")?;
    of_authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    of_authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let authority = CertifiedIssuer::self_signed(of_authority, KeyPair::generate()?)?;
    let mut texts = vec![KeyFile { name: "authority.crt".into(), pem: authority.pem(), is_private: false }];
    for host in hosts.iter().map(AsRef::as_ref) {
        let key = KeyPair::generate()?;
        let mut of_host = params(vec![host.to_owned()], host)?;
        of_host.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // A service is a server to some hosts, and a client to the others.
        of_host.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = of_host.signed_by(&key, &authority)?;
        texts.push(KeyFile { name: format!("{host}.crt"), pem: certificate.pem(), is_private: false });
        texts.push(KeyFile { name: format!("{host}.key"), pem: key.serialize_pem(), is_private: true });
    }
    Ok(texts)
}

/// Replaces a file, which never has other permissions than it is to have, nor half of its content.
fn write(path: &Path, text: &KeyFile) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = PathBuf::from(temporary);
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mode = if text.is_private { 0o600 } else { 0o644 };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
    file.write_all(text.pem.as_bytes())?;
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustls::pki_types::UnixTime;

    use super::*;
    use crate::tls::Tls;

    fn names(hosts: &[&str]) -> Vec<Name> {
        hosts.iter().map(|host| Name::new(host).unwrap()).collect()
    }

    #[test]
    fn keys_are_private_and_fit_their_hosts() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().join("keys");
        make(&["host-a", "host-b"], &at, false).unwrap();
        for host in ["host-a", "host-b"] {
            let own = Name::new(host).unwrap();
            let tls = Tls::load(&files(&at, host), &own, &names(&["host-a", "host-b"])).unwrap();
            let days = tls.ends().as_secs().saturating_sub(UnixTime::now().as_secs()).div_ceil(24 * 3600);
            assert!((VALID_DAYS as u64 - 1..=VALID_DAYS as u64 + 1).contains(&days), "{days}");
            assert_eq!(files(&at, host).key.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert_eq!(std::fs::read_dir(&at).unwrap().count(), 5);
    }

    #[test]
    fn keys_are_replaced_only_by_force() {
        let directory = tempfile::tempdir().unwrap();
        make(&["a"], directory.path(), false).unwrap();
        let before = std::fs::read(directory.path().join("a.key")).unwrap();
        let error = make(&["b", "a"], directory.path(), false).unwrap_err();
        assert!(error.to_string().contains("--force"), "{error}");
        assert!(!directory.path().join("b.key").exists());
        assert_eq!(std::fs::read(directory.path().join("a.key")).unwrap(), before);
        make(&["a"], directory.path(), true).unwrap();
        assert_ne!(std::fs::read(directory.path().join("a.key")).unwrap(), before);
    }

    #[test]
    fn names_that_cannot_be_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        for bad in [&["a", "a"][..], &[][..], &["../a"], &["a/b"], &[""], &["authority"], &["a b"]] {
            assert!(make(bad, directory.path(), false).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn files_that_do_not_fit_are_named_with_their_key() {
        let directory = tempfile::tempdir().unwrap();
        let (ours, theirs) = (directory.path().join("ours"), directory.path().join("theirs"));
        make(&["a", "b"], &ours, false).unwrap();
        make(&["a", "b"], &theirs, false).unwrap();
        let (a, hosts) = (Name::new("a").unwrap(), names(&["a", "b"]));
        let (good, others) = (files(&ours, "a"), files(&theirs, "a"));
        let refused = |files: TlsFiles| Tls::load(&files, &a, &hosts).unwrap_err().to_string();
        let garbage = directory.path().join("garbage");
        std::fs::write(&garbage, "no PEM").unwrap();
        std::fs::set_permissions(&garbage, std::fs::Permissions::from_mode(0o600)).unwrap();
        let missing = directory.path().join("missing");
        for (files, key, says) in [
            (TlsFiles { certificate: missing.clone(), ..good.clone() }, "exchange.certificate", "missing"),
            (TlsFiles { key: missing, ..good.clone() }, "exchange.key", "missing"),
            (TlsFiles { authority: garbage.clone(), ..good.clone() }, "exchange.authority", "no certificate in PEM"),
            (TlsFiles { key: garbage, ..good.clone() }, "exchange.key", "no private key in PEM"),
            (TlsFiles { key: others.key, ..good.clone() }, "exchange.key", "not the key of"),
            (TlsFiles { authority: others.authority, ..good.clone() }, "exchange.certificate", "other hosts would not"),
            (files(&ours, "b"), "exchange.certificate", "for host a"),
        ] {
            let error = refused(files);
            assert!(error.starts_with(key) && error.contains(says), "{error}");
        }
        std::fs::set_permissions(&good.key, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(refused(good).contains("every user"));
    }
}
