//! `[metrics.otlp]` of `service.toml`: the collector that metrics are pushed to.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::limits;
use crate::units::DurationText;
use crate::validate::Problems;

/// Longest key of an attribute, and longest value.
const ATTRIBUTE_BYTES_MAX: usize = 253;
/// Attributes that the service says itself.
const OWN_ATTRIBUTES: [&str; 4] = ["service.name", "service.version", "service.instance.id", "host.name"];

/// `[metrics.otlp]`: metrics by OTLP over HTTP, with JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Otlp {
    /// Where the collector takes metrics.
    pub url: CollectorUrl,
    /// From one push to the next.
    #[serde(default = "default_interval")]
    pub interval: DurationText,
    /// Attributes of the resource, beside the service's name, version and host.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

fn default_interval() -> DurationText {
    DurationText::secs(15)
}

impl Otlp {
    pub(super) fn validate(&self, problems: &mut Problems) {
        problems.within("metrics.otlp.interval", &self.interval, &limits::OTLP_INTERVAL);
        problems.within("metrics.otlp.attributes", &(self.attributes.len() as u32), &limits::OTLP_ATTRIBUTES);
        for (name, value) in &self.attributes {
            let key = format!("metrics.otlp.attributes.{name}");
            if OWN_ATTRIBUTES.contains(&name.as_str()) {
                problems.add(&key, "is what the service says itself; leave it out");
            }
            let is_text = |text: &str| {
                !text.is_empty() && text.len() <= ATTRIBUTE_BYTES_MAX && !text.chars().any(char::is_control)
            };
            if !is_text(name) || !is_text(value) {
                let message = format!(
                    "an attribute's key and value have 1 to {ATTRIBUTE_BYTES_MAX} bytes, none of them a control character"
                );
                problems.add(&key, message);
            }
        }
    }
}

/// Where a collector takes metrics: `http://HOST:PORT/PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorUrl {
    /// A name, or an address without brackets.
    pub host: String,
    /// Never 0.
    pub port: u16,
    /// From the slash on.
    pub path: String,
}

impl FromStr for CollectorUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let wrong = |what: &str| format!("{url:?} {what}; write for example \"http://127.0.0.1:4318/v1/metrics\"");
        if url.starts_with("https://") {
            return Err(wrong("is not supported: name a collector on this host, which goes on with TLS"));
        }
        let rest = url.strip_prefix("http://").ok_or_else(|| wrong("is no URL of a collector"))?;
        let (authority, path) = rest.split_once('/').ok_or_else(|| wrong("has no path"))?;
        if path.is_empty() {
            return Err(wrong("has no path"));
        }
        let (host, port) = authority.rsplit_once(':').ok_or_else(|| wrong("has no port"))?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_name = |host: &str| {
            !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
        };
        let is_host = bare.map_or_else(|| is_name(host), |address| address.parse::<std::net::Ipv6Addr>().is_ok());
        if !is_host {
            return Err(wrong("names no host"));
        }
        let is_digits = port.chars().all(|c| c.is_ascii_digit());
        let port = port.parse().ok().filter(|port| *port != 0 && is_digits).ok_or_else(|| wrong("has no port"))?;
        if !path.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '#' | '"' | '\\')) {
            return Err(wrong("has a path with characters that a URL has not"));
        }
        Ok(CollectorUrl { host: bare.unwrap_or(host).to_owned(), port, path: format!("/{path}") })
    }
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "http://[{}]:{}{}", self.host, self.port, self.path),
            false => write!(f, "http://{}:{}{}", self.host, self.port, self.path),
        }
    }
}

impl Serialize for CollectorUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CollectorUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use crate::service::ServiceConfig;

    use super::*;

    #[test]
    fn urls_have_a_host_a_port_and_a_path() {
        for url in ["http://127.0.0.1:4318/v1/metrics", "http://otel-collector.svc:1/a/b?c=d", "http://[fd00::1]:9/x"] {
            assert_eq!(url.parse::<CollectorUrl>().unwrap().to_string(), url);
        }
        for (url, why) in [
            ("", "is no URL"),
            ("127.0.0.1:4318/v1/metrics", "is no URL"),
            ("grpc://a:4317/x", "is no URL"),
            ("https://a:4318/v1/metrics", "on this host"),
            ("http://a:4318", "has no path"),
            ("http://a:4318/", "has no path"),
            ("http://a/v1/metrics", "has no port"),
            ("http://a:0/v1/metrics", "has no port"),
            ("http://a:+80/v1/metrics", "has no port"),
            ("http://a:65536/v1/metrics", "has no port"),
            ("http://:4318/v1/metrics", "names no host"),
            ("http://u@a:4318/v1/metrics", "names no host"),
            ("http://[a]:4318/v1/metrics", "names no host"),
            ("http://a:4318/v1/metrics HTTP/1.1\r\nX: y", "characters"),
            ("http://a:4318/v1#x", "characters"),
        ] {
            let error = url.parse::<CollectorUrl>().unwrap_err();
            assert!(error.contains(why) && error.contains("http://127.0.0.1:4318/v1/metrics"), "{url}: {error}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_by_key() {
        let url = "url = \"http://127.0.0.1:4318/v1/metrics\"\n";
        for (text, key, why) in [
            ("[metrics]\n".to_owned(), "metrics", "listen"),
            ("[metrics.otlp]\n".to_owned(), "metrics.otlp", "missing field `url`"),
            ("[metrics.otlp]\nurl = \"collector\"\n".to_owned(), "metrics.otlp.url", "is no URL"),
            (format!("[metrics.otlp]\n{url}interval = \"0\"\n"), "metrics.otlp.interval", "must be from 1s to 1h"),
            (format!("[metrics.otlp]\n{url}interval = \"2h\"\n"), "metrics.otlp.interval", "must be from 1s to 1h"),
            (format!("[metrics.otlp]\n{url}intervall = \"2s\"\n"), "metrics.otlp.intervall", "`interval`"),
            (
                format!("[metrics.otlp]\n{url}attributes = {{\"service.name\" = \"x\"}}\n"),
                "metrics.otlp.attributes.service.name",
                "says itself",
            ),
            (format!("[metrics.otlp]\n{url}attributes = {{a = \"\"}}\n"), "metrics.otlp.attributes.a", "1 to 253"),
            (format!("[metrics.otlp]\n{url}attributes = {{a = 1}}\n"), "metrics.otlp.attributes.a", "string"),
        ] {
            let error = ServiceConfig::parse(&text, "s.toml").unwrap_err();
            let found = &error.diagnostics()[0];
            assert!(found.key == key && found.message.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_service_may_push_without_listening() {
        let text = "[metrics.otlp]\nurl = \"http://127.0.0.1:4318/v1/metrics\"\nattributes = {\"k8s.cluster.name\" = \"east\"}\n";
        let config = ServiceConfig::parse(text, "s.toml").unwrap();
        let metrics = config.metrics.as_ref().unwrap();
        let otlp = metrics.otlp.as_ref().unwrap();
        assert_eq!((metrics.listen, otlp.interval), (None, DurationText::secs(15)));
        assert_eq!(otlp.attributes["k8s.cluster.name"], "east");
        assert_eq!(ServiceConfig::parse(&config.to_toml(), "again.toml").unwrap(), config);
    }
}
