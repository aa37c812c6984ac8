//! URLs of servers: scheme, host and port, and no path.

use std::fmt;
use std::str::FromStr;

/// A server's port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Whether TLS proves who answers.
    pub is_tls: bool,
    /// A name, or an address without brackets.
    pub host: String,
    /// Never 0.
    pub port: u16,
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let wrong = || format!("{url:?} is no endpoint; write for example \"https://10.0.0.1:2379\"");
        let (is_tls, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(wrong()),
        };
        let (host, port) = rest.strip_suffix('/').unwrap_or(rest).rsplit_once(':').ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_plain = |host: &str| {
            !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
        };
        let is_host = match bare {
            Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
            None => is_plain(host),
        };
        let port = port.parse().ok().filter(|port| *port != 0 && is_host).ok_or_else(wrong)?;
        Ok(Endpoint { is_tls, host: bare.unwrap_or(host).to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_urls_with_a_port_and_nothing_else() {
        for url in ["https://10.0.0.1:2379", "http://etcd-0.etcd.svc:2379", "https://[fd00::1]:2379"] {
            assert_eq!(url.parse::<Endpoint>().unwrap().to_string(), url);
        }
        assert_eq!("http://a:1/".parse::<Endpoint>().unwrap().to_string(), "http://a:1");
        let wrong = ["", "10.0.0.1:2379", "ftp://a:1", "https://a", "https://a:0", "https://a:1/v3", "https://:1"];
        for url in wrong.into_iter().chain(["https://a b:1", "https://u@a:1", "https://[a]:1", "http://a:1\r\nX: y"]) {
            assert!(url.parse::<Endpoint>().unwrap_err().contains("no endpoint"), "{url}");
        }
    }
}
