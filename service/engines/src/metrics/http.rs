//! HTTP/1 of `/metrics`, its only path: the head of one request, and the head of the answer.
//!
//! Pure. Bytes are a stranger's: a head has a bounded length, and what is no head gets a status, not a guess. Deliberately
//! absent: bodies, connections that are kept for another request, content codings.

/// Longest head of a request. Prometheus sends some 300 bytes.
pub const HEAD_BYTES_MAX: usize = 8 << 10;

/// Status of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The metrics follow.
    Ok,
    /// Not HTTP.
    BadRequest,
    /// There is nothing else than `/metrics`.
    NotFound,
    /// It can only be read.
    MethodNotAllowed,
    /// Not so long.
    HeadTooLong,
    /// Not HTTP/1.
    VersionNotSupported,
}

impl Status {
    fn text(self) -> &'static str {
        match self {
            Status::Ok => "200 OK",
            Status::BadRequest => "400 Bad Request",
            Status::NotFound => "404 Not Found",
            Status::MethodNotAllowed => "405 Method Not Allowed",
            Status::HeadTooLong => "431 Request Header Fields Too Large",
            Status::VersionNotSupported => "505 HTTP Version Not Supported",
        }
    }
}

/// The answer to the bytes that have come so far; `None` if more have to come. Bytes behind the head are ignored.
#[must_use]
pub fn asked(bytes: &[u8]) -> Option<Status> {
    // A client that talks something else is told at once: there may be no line to wait for.
    let is_odd = |byte: &&u8| !(byte.is_ascii_graphic() || matches!(byte, b' ' | b'\t' | b'\r' | b'\n'));
    let first_line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    if first_line.iter().any(|byte| is_odd(&byte)) {
        return Some(Status::BadRequest);
    }
    if !has_end(bytes) {
        return (bytes.len() >= HEAD_BYTES_MAX).then_some(Status::HeadTooLong);
    }
    let line = std::str::from_utf8(first_line).ok().map(|line| line.strip_suffix('\r').unwrap_or(line));
    let mut words = line.unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Some(Status::BadRequest);
    };
    let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_alphabetic());
    Some(match version {
        _ if !is_method || target.is_empty() => Status::BadRequest,
        "HTTP/1.0" | "HTTP/1.1" if path(target) != "/metrics" => Status::NotFound,
        "HTTP/1.0" | "HTTP/1.1" if method != "GET" => Status::MethodNotAllowed,
        "HTTP/1.0" | "HTTP/1.1" => Status::Ok,
        _ if version.starts_with("HTTP/") => Status::VersionNotSupported,
        _ => Status::BadRequest,
    })
}

/// Whether an empty line has come.
fn has_end(bytes: &[u8]) -> bool {
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').skip(1);
    lines.any(|line| line == b"\n" || line == b"\r\n")
}

/// The path of a request's target, without a query. Targets may be whole addresses, too.
fn path(target: &str) -> &str {
    let path = match target.split_once("://") {
        Some(("http", rest)) => rest.find('/').map_or("/", |at| &rest[at..]),
        _ => target,
    };
    path.split(['?', '#']).next().unwrap_or_default()
}

/// The answer as it goes out; `body` is the metrics where the status is [`Status::Ok`].
#[must_use]
pub fn answer(status: Status, body: &str) -> Vec<u8> {
    let (kind, allow) = match status {
        Status::Ok => ("text/plain; version=0.0.4; charset=utf-8", ""),
        Status::MethodNotAllowed => ("text/plain; charset=utf-8", "Allow: GET\r\n"),
        _ => ("text/plain; charset=utf-8", ""),
    };
    let words = format!("{}\n", status.text());
    let body = if status == Status::Ok { body } else { &words };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{allow}Connection: close\r\n\r\n",
        status.text()
    );
    [head.as_bytes(), body.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer, however the bytes are cut.
    fn of(text: &str) -> Option<Status> {
        let whole = asked(text.as_bytes());
        for end in 0..text.len() {
            let part = asked(&text.as_bytes()[..end]);
            assert!(part.is_none() || part == whole, "{:?} gets {part:?}, all of it {whole:?}", &text[..end]);
        }
        whole
    }

    #[test]
    fn only_metrics_can_only_be_read() {
        assert_eq!(of("GET /metrics HTTP/1.1\r\nHost: a:1\r\nAccept: text/plain\r\n\r\n"), Some(Status::Ok));
        assert_eq!(of("GET /metrics HTTP/1.0\n\n"), Some(Status::Ok));
        assert_eq!(of("GET /metrics?debug=1 HTTP/1.1\r\n\r\n"), Some(Status::Ok));
        assert_eq!(of("GET http://a:1/metrics HTTP/1.1\r\n\r\n"), Some(Status::Ok));
        for path in ["/", "/metrics/", "/metricsx", "/../metrics", "http://metrics", "*"] {
            assert_eq!(of(&format!("GET {path} HTTP/1.1\r\n\r\n")), Some(Status::NotFound), "{path}");
        }
        for method in ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "get"] {
            assert_eq!(of(&format!("{method} /metrics HTTP/1.1\r\n\r\n")), Some(Status::MethodNotAllowed), "{method}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for text in [
            "GET /metrics\r\n\r\n",
            "GET  /metrics HTTP/1.1\r\n\r\n",
            "\r\n\r\n",
            "GET /metrics FTP/1\r\n\r\n",
            "1 2 3\n\n",
        ] {
            assert_eq!(of(text), Some(Status::BadRequest), "{text:?}");
        }
        assert_eq!(of("GET /metrics HTTP/2.0\r\n\r\n"), Some(Status::VersionNotSupported));
        // A TLS greeting: at once, for there may never be the end of a line.
        assert_eq!(asked(&[0x16, 0x03, 0x01]), Some(Status::BadRequest));
        assert_eq!(asked(b"GET /\xff"), Some(Status::BadRequest));
    }

    #[test]
    fn heads_may_come_in_parts_and_have_an_end() {
        for part in ["", "G", "GET /metrics HTTP/1.1", "GET /metrics HTTP/1.1\r\nHost: a\r\n", "\n"] {
            assert_eq!(asked(part.as_bytes()), None, "{part:?}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(HEAD_BYTES_MAX));
        assert_eq!(asked(long.as_bytes()), Some(Status::HeadTooLong));
        assert_eq!(asked(&long.as_bytes()[..HEAD_BYTES_MAX - 1]), None);
        // Bytes behind the first request wait for nobody.
        let two = "GET /metrics HTTP/1.1\r\n\r\nGET /other HTTP/1.1\r\n\r\n";
        assert_eq!(asked(two.as_bytes()), Some(Status::Ok));
    }

    #[test]
    fn answers_say_how_long_they_are() {
        let text = |status, body| String::from_utf8(answer(status, body)).unwrap();
        let (head, body) = (text(Status::Ok, "a 1\n"), "\r\n\r\na 1\n");
        assert!(
            head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with(body) && head.contains("Content-Length: 4\r\n")
        );
        let refused = text(Status::MethodNotAllowed, "a 1\n");
        assert!(refused.contains("\r\nAllow: GET\r\n") && !refused.contains("a 1"), "{refused}");
    }
}
