//! Answers: status, headers that hold for all of them, and a body in one piece.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Response, StatusCode, header};

/// A body in one piece.
pub struct Whole(Option<Bytes>);

impl Body for Whole {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

/// An answer to a browser.
pub type Answer = Response<Whole>;

/// Sources that the page may load: itself, from here alone; and nobody may frame it. Scripts cannot make markup
/// of texts.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HEADERS: [(HeaderName, &str); 7] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    // Whoever has it may show it again once it is known to be the newest.
    (header::CACHE_CONTROL, "private, no-cache"),
];

/// An answer of this kind.
#[must_use]
pub fn of(status: StatusCode, kind: &'static str, body: Bytes) -> Answer {
    let mut answer = Response::new(Whole(Some(body).filter(|body| !body.is_empty())));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// JSON.
#[must_use]
pub fn json(body: impl Into<Bytes>) -> Answer {
    of(StatusCode::OK, "application/json", body.into())
}

/// Why there is no document: `code` for programs, `message` for people.
#[must_use]
pub fn error(status: StatusCode, code: &str, message: &str) -> Answer {
    let body = serde_json::json!({ "error": { "code": code, "message": message } });
    of(status, "application/json", body.to_string().into())
}

/// With a tag by which a browser asks for what is newer.
#[must_use]
pub fn tagged(mut answer: Answer, tag: &str) -> Answer {
    if let Ok(tag) = HeaderValue::from_str(tag) {
        answer.headers_mut().insert(header::ETAG, tag);
    }
    answer
}

/// Nothing is newer.
#[must_use]
pub fn unchanged(tag: &str) -> Answer {
    let mut answer = of(StatusCode::NOT_MODIFIED, "", Bytes::new());
    // The kind belongs to what the browser has.
    answer.headers_mut().remove(header::CONTENT_TYPE);
    tagged(answer, tag)
}
