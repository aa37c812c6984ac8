//! Which requests are let in: those under the console's own names, of its own pages or of programs, that say nothing ambiguous. Pure.
//!
//! A page of another site may lead a browser here. `Host` says under which name it came, which tells a name that was bent to this address
//! (DNS rebinding); `Origin` and `Sec-Fetch-Site` say whose page asks.

use std::net::{IpAddr, SocketAddr};

use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, StatusCode, Version, header};

/// Longest target of a request.
const TARGET_BYTES_MAX: usize = 1024;

/// Why a request is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP's word for it.
    pub status: StatusCode,
    /// For programs.
    pub code: &'static str,
    /// For people.
    pub message: &'static str,
}

const fn refusal(status: StatusCode, code: &'static str, message: &'static str) -> Refusal {
    Refusal { status, code, message }
}

const NO_HOST: Refusal =
    refusal(StatusCode::BAD_REQUEST, "bad_host", "a request has one Host header, which names this console");
const WRONG_NAME: Refusal = refusal(
    StatusCode::MISDIRECTED_REQUEST,
    "wrong_name",
    "this console is not known by that name: add it to console.names, or use the address",
);
const OTHER_SITE: Refusal =
    refusal(StatusCode::FORBIDDEN, "other_site", "a page of another site asks: only this console's own may");
const TOO_LONG: Refusal = refusal(StatusCode::URI_TOO_LONG, "uri_too_long", "no path here has as many bytes");
const BAD_TARGET: Refusal =
    refusal(StatusCode::BAD_REQUEST, "bad_target", "a target is a path of letters, digits and -._/, with a query");
const NO_BODY: Refusal = refusal(StatusCode::BAD_REQUEST, "no_body", "a request that looks has no body");

/// Whether a request is let in.
pub struct Gate {
    names: Vec<String>,
}

impl Gate {
    /// Under these names besides the address and `localhost`.
    #[must_use]
    pub fn new(names: &[String]) -> Self {
        Gate { names: names.iter().map(|name| name.to_ascii_lowercase()).collect() }
    }

    /// Lets a request in that came to the address `own`.
    ///
    /// # Errors
    /// Why not.
    pub fn admit(&self, parts: &Parts, own: SocketAddr) -> Result<(), Refusal> {
        let authority = self.name(&parts.headers, own)?;
        // Targets are paths: of whole addresses the one in the target would be another one than the header's.
        let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
        if parts.uri.authority().is_some() || parts.version > Version::HTTP_11 {
            return Err(BAD_TARGET);
        }
        if target.len() > TARGET_BYTES_MAX {
            return Err(TOO_LONG);
        }
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/".contains(&byte);
        if !parts.uri.path().bytes().all(is_plain) || parts.uri.path().contains("..") {
            return Err(BAD_TARGET);
        }
        let has_body = parts.headers.contains_key(header::TRANSFER_ENCODING)
            || parts.headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0");
        if has_body && parts.method != Method::POST {
            return Err(NO_BODY);
        }
        // Other sites may link to the page.
        let is_for_programs = parts.uri.path().starts_with("/api/");
        if is_for_programs && !is_of_own_page(&parts.headers, authority) {
            return Err(OTHER_SITE);
        }
        Ok(())
    }

    /// The name under which the request came, with its port.
    fn name<'a>(&self, headers: &'a HeaderMap, own: SocketAddr) -> Result<&'a str, Refusal> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(NO_HOST) };
        let authority = host.to_str().map_err(|_| NO_HOST)?;
        let name = without_port(authority).ok_or(NO_HOST)?;
        let is_address = name.parse::<IpAddr>().is_ok_and(|address| address == own.ip().to_canonical());
        let is_local = own.ip().to_canonical().is_loopback() && name.eq_ignore_ascii_case("localhost");
        let is_named = self.names.iter().any(|known| name.eq_ignore_ascii_case(known));
        if is_address || is_local || is_named { Ok(authority) } else { Err(WRONG_NAME) }
    }
}

/// The name of `name:port`, `[address]:port`, or either without a port.
fn without_port(authority: &str) -> Option<&str> {
    let (name, rest) = match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let is_port =
        |rest: &str| rest.is_empty() || rest.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok());
    (!name.is_empty() && is_port(rest)).then_some(name)
}

/// Whether a page of this console asks, or a program, which says nothing of pages.
fn is_of_own_page(headers: &HeaderMap, authority: &str) -> bool {
    let origins = headers.get_all(header::ORIGIN).iter().all(|origin| {
        let own = |scheme: &str| origin.to_str().ok().and_then(|origin| origin.strip_prefix(scheme));
        // A proxy in front may speak TLS.
        [own("http://"), own("https://")].into_iter().flatten().any(|own| own.eq_ignore_ascii_case(authority))
    });
    let sites = headers.get_all("sec-fetch-site").iter().all(|site| site == "same-origin" || site == "none");
    origins && sites
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn admit(method: &str, target: &str, headers: &[(&str, &str)]) -> Result<(), &'static str> {
        let mut request = Request::builder().method(method).uri(target);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        let gate = Gate::new(&["Console.Example.org".to_owned()]);
        gate.admit(&parts, ([127, 0, 0, 1], 9480).into()).map_err(|refusal| refusal.code)
    }

    #[test]
    fn only_the_consoles_own_names_are_let_in() {
        for host in [
            "127.0.0.1:9480",
            "127.0.0.1",
            "localhost:9480",
            "LOCALHOST",
            "console.example.ORG",
            "console.example.org:443",
        ] {
            assert_eq!(admit("GET", "/", &[("host", host)]), Ok(()), "{host}");
        }
        for host in
            ["evil.example.org", "127.0.0.2", "127.0.0.1.evil.org", "localhost.evil.org", "console.example.org."]
        {
            assert_eq!(admit("GET", "/", &[("host", host)]), Err("wrong_name"), "{host}");
        }
        for host in ["", ":80", "localhost:x", "localhost:80:80", "[::1", "a@localhost:99999"] {
            assert_eq!(admit("GET", "/", &[("host", host)]), Err("bad_host"), "{host}");
        }
        assert_eq!(admit("GET", "/", &[]), Err("bad_host"));
        assert_eq!(admit("GET", "/", &[("host", "localhost"), ("host", "localhost")]), Err("bad_host"));
        let (parts, ()) = Request::get("/").header("host", "localhost").body(()).expect("a request").into_parts();
        let outside = Gate::new(&[]).admit(&parts, ([10, 0, 0, 1], 9480).into());
        assert_eq!(outside, Err(WRONG_NAME), "localhost is this host's name alone");
    }

    #[test]
    fn pages_of_other_sites_read_nothing() {
        let own = ("host", "localhost:9480");
        let api = |header: (&str, &str)| admit("GET", "/api/v1/overview", &[own, header]);
        for origin in ["http://localhost:9480", "https://localhost:9480"] {
            assert_eq!(api(("origin", origin)), Ok(()));
        }
        for origin in
            ["http://localhost", "http://evil.org", "null", "http://localhost:9480.evil.org", "localhost:9480", ""]
        {
            assert_eq!(api(("origin", origin)), Err("other_site"), "{origin}");
        }
        for (site, let_in) in [("same-origin", true), ("none", true), ("cross-site", false), ("same-site", false)] {
            assert_eq!(api(("sec-fetch-site", site)).is_ok(), let_in, "{site}");
        }
        let linked = [own, ("sec-fetch-site", "cross-site")];
        assert_eq!(admit("GET", "/", &linked), Ok(()), "a link to the page");
    }

    #[test]
    fn targets_say_one_thing() {
        let own = ("host", "localhost");
        for target in ["/a%2e%2e/b", "/../etc/passwd", "/a;b", "/%00", "/a\\b", "http://localhost/api/v1/overview"] {
            if target.parse::<hyper::Uri>().is_ok() {
                assert_eq!(admit("GET", target, &[own]), Err("bad_target"), "{target}");
            }
        }
        let long = format!("/{}", "a".repeat(TARGET_BYTES_MAX));
        assert_eq!(admit("GET", &long, &[own]), Err("uri_too_long"));
        for header in [("content-length", "7"), ("transfer-encoding", "chunked"), ("content-length", "x")] {
            assert_eq!(admit("GET", "/", &[own, header]), Err("no_body"), "{header:?}");
        }
        assert_eq!(admit("GET", "/", &[own, ("content-length", "0")]), Ok(()));
    }
}
