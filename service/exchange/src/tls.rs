//! TLS 1.3 with certificates on both sides (mutual): which peers are hosts, from files that the
//! operator names.
//!
//! A host is who has a certificate that the cluster's authority signed and that names exactly one host of the list. Whoever
//! connects to a host verifies that it is that one; whoever accepts learns the name from the certificate. Nothing that a peer
//! says about itself counts.
//!
//! Deliberately absent: revocation (a host is shut out by its removal from the list), resumption (links are few and last),
//! names that are looked up, and any other version of TLS.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use super::protocol::Name;

/// Bytes of a file of certificates or of a key; what is longer is some other file.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The files of a host, PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Its certificate, and intermediate ones behind it.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Certificates of the authority.
    pub authority: PathBuf,
}

/// Why files cannot be used. The operator's fault.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// Not readable.
    #[error("exchange.{key}: cannot read {}: {source}", .path.display())]
    Read {
        /// Key of the configuration.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A file is of no use.
    #[error("exchange.{key}: {}: {problem}", .path.display())]
    File {
        /// Key of the configuration.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// The mistake, and the remedy.
        problem: String,
    },
}

/// Why a peer is not the host that it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    /// None of the list.
    #[error("its certificate names no host of the list")]
    Unlisted,
    /// More than one.
    #[error("its certificate names several hosts, {0} and {1}: each host needs its own")]
    Several(Name, Name),
    /// It shows none.
    #[error("it has no certificate that can be read")]
    NoCertificate,
}

/// This host's identity, and the authority of its peers.
#[derive(Debug, Clone)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    hosts: Arc<[(Name, ServerName<'static>)]>,
    ends: UnixTime,
}

impl Tls {
    /// When other hosts take this one no longer for who it is: its certificate, or one above it, ends.
    #[must_use]
    pub fn ends(&self) -> UnixTime {
        self.ends
    }

    /// Reads the files of host `own`, one of `hosts`, and checks that the others would take it for that.
    ///
    /// # Errors
    /// [`TlsError`]: which key, which file, and what is wrong with it.
    pub fn load(files: &TlsFiles, own: &Name, hosts: &[Name]) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = Arc::new(authority(&files.authority)?);
        let chain = certificates("certificate", &files.certificate)?;
        let hosts = names(hosts).map_err(|problem| of_file("certificate", &files.certificate, problem))?;
        let ends = check_own(&chain, &roots, &provider, own, files)?;
        let identity = named(&chain, &hosts).map_err(|error| {
            of_file("certificate", &files.certificate, error.to_string().replace("its certificate", "the certificate"))
        })?;
        debug_assert_eq!(&identity, own);
        let key = private_key(&files.key)?;
        let pair = |error: rustls::Error| {
            let problem = format!("it is not the key of {}: {error}", files.certificate.display());
            of_file("key", &files.key, problem)
        };
        let broken = |error: &dyn std::fmt::Display| of_file("authority", &files.authority, error.to_string());
        let verifier: Arc<dyn ClientCertVerifier> =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|error| broken(&error))?;
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| broken(&error))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(pair)?;
        client.resumption = Resumption::disabled();
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|error| broken(&error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(pair)?;
        server.send_tls13_tickets = 0;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server), hosts, ends })
    }

    /// The side of who connects to a host of the list. `None` for any other.
    #[must_use]
    pub fn connect(&self, host: &Name) -> Option<Connection> {
        let (_, name) = self.hosts.iter().find(|(name, _)| name == host)?;
        ClientConnection::new(Arc::clone(&self.client), name.clone()).ok().map(Connection::Client)
    }

    /// The side of who accepts.
    ///
    /// # Errors
    /// Those of the TLS library: none with the configurations made here.
    pub fn accept(&self) -> Result<Connection, rustls::Error> {
        ServerConnection::new(Arc::clone(&self.server)).map(Connection::Server)
    }

    /// Host at the other end of a connection whose handshake is complete.
    ///
    /// # Errors
    /// [`PeerError`]: not exactly one host of the list.
    pub fn peer(&self, connection: &Connection) -> Result<Name, PeerError> {
        named(connection.peer_certificates().unwrap_or_default(), &self.hosts)
    }
}

/// A number that differs each time that a service starts.
///
/// # Errors
/// A system without random numbers.
pub fn random_number() -> Result<u64, io::Error> {
    let mut bytes = [0; 8];
    let random = rustls::crypto::ring::default_provider().secure_random;
    random.fill(&mut bytes).map_err(|_| io::Error::other("the system has no random numbers"))?;
    Ok(u64::from_le_bytes(bytes))
}

fn of_file(key: &'static str, path: &Path, problem: impl Into<String>) -> TlsError {
    TlsError::File { key, path: path.to_owned(), problem: problem.into() }
}

fn names(hosts: &[Name]) -> Result<Arc<[(Name, ServerName<'static>)]>, String> {
    let name = |host: &Name| {
        let name = ServerName::try_from(host.as_str().to_owned());
        name.map(|name| (host.clone(), name))
            .map_err(|_| format!("host {host} has a name that no certificate can have"))
    };
    hosts.iter().map(name).collect()
}

/// The one host of the list that a certificate names.
fn named(chain: &[CertificateDer<'_>], hosts: &[(Name, ServerName<'static>)]) -> Result<Name, PeerError> {
    let certificate = chain.first().and_then(|first| ParsedCertificate::try_from(first).ok());
    let certificate = certificate.ok_or(PeerError::NoCertificate)?;
    let mut named = hosts.iter().filter(|(_, name)| verify_server_name(&certificate, name).is_ok());
    match (named.next(), named.next()) {
        (Some((host, _)), None) => Ok(host.clone()),
        (Some((one, _)), Some((other, _))) => Err(PeerError::Several(one.clone(), other.clone())),
        (None, _) => Err(PeerError::Unlisted),
    }
}

/// A chain that is good for longer is good for ever.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Checks what every other host is going to check, so that whoever can mend it is told. Returns until when they are content.
fn check_own(
    chain: &[CertificateDer<'static>],
    roots: &Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
    own: &Name,
    files: &TlsFiles,
) -> Result<UnixTime, TlsError> {
    let unfit = |problem: String| of_file("certificate", &files.certificate, problem);
    let builder = WebPkiServerVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(provider));
    let verifier = builder.build().map_err(|error: VerifierBuilderError| unfit(error.to_string()))?;
    let name = ServerName::try_from(own.as_str().to_owned()).map_err(|error| unfit(error.to_string()))?;
    let Some((first, others)) = chain.split_first() else { return Err(unfit("it holds no certificate".into())) };
    let verify = |at: UnixTime| verifier.verify_server_cert(first, others, &name, &[], at);
    let now = UnixTime::now();
    verify(now).map_err(|error| {
        let authority = files.authority.display();
        unfit(format!("other hosts would not take this for host {own} by the authority of {authority}: {error}"))
    })?;
    // A certificate that is good now is good until it ends: the last second at which it is.
    let (mut good, mut bad) = (now.as_secs(), now.as_secs() + LONGEST.as_secs());
    while bad - good > 1 {
        let middle = good.midpoint(bad);
        match verify(UnixTime::since_unix_epoch(Duration::from_secs(middle))) {
            Ok(_) => good = middle,
            Err(_) => bad = middle,
        }
    }
    Ok(UnixTime::since_unix_epoch(Duration::from_secs(good)))
}

fn read(key: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    let failed = |source| TlsError::Read { key, path: path.to_owned(), source };
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
        return Err(of_file(key, path, "it is no file of PEM text"));
    }
    std::fs::read(path).map_err(failed)
}

fn not_pem(key: &'static str, path: &Path, what: &str, error: &pem::Error) -> TlsError {
    let problem = match error {
        pem::Error::NoItemsFound => format!("it holds no {what} in PEM"),
        error => format!("it cannot be read as {what} in PEM: {error}"),
    };
    of_file(key, path, problem)
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bytes = read(key, path)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match all {
        Ok(all) if all.is_empty() => Err(not_pem(key, path, "certificate", &pem::Error::NoItemsFound)),
        Ok(all) => Ok(all),
        Err(error) => Err(not_pem(key, path, "certificate", &error)),
    }
}

fn authority(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("authority", path)? {
        roots.add(certificate).map_err(|error| {
            of_file("authority", path, format!("it holds a certificate that cannot be an authority's: {error}"))
        })?;
    }
    Ok(roots)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    use std::os::unix::fs::PermissionsExt;
    let bytes = read("key", path)?;
    let mode = std::fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode());
    if mode & 0o007 != 0 {
        let problem = "every user of this host can read or change it; take that away: chmod o-rwx, or make a new one";
        return Err(of_file("key", path, problem));
    }
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| not_pem("key", path, "private key", &error))
}
