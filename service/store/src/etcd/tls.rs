//! TLS towards etcd: who may be etcd, and who this service is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// Reads the files.
///
/// # Errors
/// Which file is wrong, and why.
pub(super) fn client(authority: &Path, identity: Option<&(PathBuf, PathBuf)>) -> Result<Arc<ClientConfig>, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authority)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}", authority.display()))?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let config = match identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates(certificate)?;
            let private = PrivateKeyDer::from_pem_file(key).map_err(|error| format!("{}: {error}", key.display()))?;
            builder.with_client_auth_cert(chain, private).map_err(|error| {
                format!("{}: it is not the key of {}: {error}", key.display(), certificate.display())
            })?
        }
    };
    Ok(Arc::new(config))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let read = CertificateDer::pem_file_iter(file).map_err(|error| wrong(&error))?;
    let certificates: Vec<_> = read.collect::<Result<_, _>>().map_err(|error| wrong(&error))?;
    if certificates.is_empty() { Err(wrong(&"it has no certificate")) } else { Ok(certificates) }
}
