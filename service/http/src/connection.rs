//! A connection: a request with a JSON body, an answer with a length or in chunks.
//!
//! The answering side is checked by TLS, and believed no length: an answer that is longer than one can be ends the
//! connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use super::Endpoint;

/// Bytes of an answer, or of a message of a watch.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Bytes of the lines before an answer, of a chunk's first line, and of trailers.
const HEAD_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;
/// Read at a time.
const READ_BYTES: usize = 16 << 10;
/// Encrypted at a time.
const WRITE_BYTES: usize = 64 << 10;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The time was over before.
    #[error("no answer in time")]
    Late,
    /// The other side has ended the connection.
    #[error("the connection has ended")]
    Ended,
    /// The kernel's reason.
    #[error("{0}")]
    Io(io::Error),
    /// TLS says that either side is not who it should be.
    #[error("{0}")]
    Refused(String),
    /// A part of the answer cannot be read.
    #[error("its answer is no HTTP: {0}")]
    NoHttp(&'static str),
}

/// A POST request.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Path of the resource, with the query.
    pub path: &'a str,
    /// Value of the header `Authorization`. One with characters that no header may have is left out.
    pub token: Option<&'a str>,
    /// Further headers.
    pub headers: &'a [(&'a str, &'a str)],
    /// A JSON text.
    pub body: &'a [u8],
}

impl<'a> Request<'a> {
    /// A request without a token and further headers.
    #[must_use]
    pub fn new(path: &'a str, body: &'a [u8]) -> Self {
        Request { path, token: None, headers: &[], body }
    }
}

/// An answer that has come whole.
pub struct Response {
    /// Its code.
    pub status: u16,
    /// Target of a redirection, if there is one.
    pub location: Option<String>,
    /// The answer.
    pub body: Vec<u8>,
}

enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

/// A connection to a server: for one request after the other, or for one answer without end.
pub struct Connection {
    stream: Stream,
    host: String,
    /// Bytes that were read and not used yet.
    buffer: Vec<u8>,
    /// The answer before has not come whole, or was the last one.
    is_over: bool,
    /// Bytes of an answer, or of a part of one.
    answer_bytes_max: usize,
}

/// The lines before an answer.
struct Head {
    status: u16,
    location: Option<String>,
    body: Body,
    /// The connection ends with it.
    is_last: bool,
}

/// How an answer's body ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Body {
    Length(usize),
    Chunks,
    UntilEnd,
}

impl Connection {
    /// Connects before a time.
    ///
    /// # Errors
    /// [`HttpError`].
    pub fn open(endpoint: &Endpoint, tls: Option<&Arc<ClientConfig>>, until: Instant) -> Result<Self, HttpError> {
        let addresses = (&*endpoint.host, endpoint.port).to_socket_addrs().map_err(HttpError::Io)?;
        let mut last = HttpError::Io(ErrorKind::AddrNotAvailable.into());
        let mut socket = None;
        for address in addresses {
            match TcpStream::connect_timeout(&address, left(until)?) {
                Ok(connected) => {
                    socket = Some(connected);
                    break;
                }
                Err(error) => last = of_io(error),
            }
        }
        let Some(socket) = socket else { return Err(last) };
        socket.set_nodelay(true).map_err(HttpError::Io)?;
        socket.set_write_timeout(Some(left(until)?)).map_err(HttpError::Io)?;
        let stream = match tls.filter(|_| endpoint.is_tls) {
            None => Stream::Plain(socket),
            Some(config) => {
                let name = ServerName::try_from(endpoint.host.clone());
                let name = name.map_err(|error| HttpError::Refused(error.to_string()))?;
                let session = ClientConnection::new(Arc::clone(config), name);
                let session = session.map_err(|error| HttpError::Refused(error.to_string()))?;
                Stream::Tls(Box::new(StreamOwned::new(session, socket)))
            }
        };
        let host = format!("{}:{}", endpoint.host, endpoint.port);
        Ok(Connection { stream, host, buffer: Vec::new(), is_over: false, answer_bytes_max: ANSWER_BYTES_MAX })
    }

    /// Takes no longer answers than that.
    #[must_use]
    pub fn with_answers_up_to(self, bytes: usize) -> Self {
        Connection { answer_bytes_max: bytes, ..self }
    }

    fn socket(&self) -> &TcpStream {
        match &self.stream {
            Stream::Plain(socket) => socket,
            Stream::Tls(stream) => &stream.sock,
        }
    }

    /// Whether another request may be sent: nobody has closed it meanwhile.
    pub fn is_open(&self) -> bool {
        let is_quiet = |socket: &TcpStream| {
            socket.set_nonblocking(true)?;
            let peeked = socket.peek(&mut [0]);
            socket.set_nonblocking(false)?;
            peeked
        };
        // Something to read is an answer to nothing, or the end.
        let blocks = |error: io::Error| error.kind() == ErrorKind::WouldBlock;
        !self.is_over && self.buffer.is_empty() && is_quiet(self.socket()).is_err_and(blocks)
    }

    /// Sends a request and waits for the whole answer.
    ///
    /// # Errors
    /// [`HttpError`]; it may have been heard.
    pub fn post(&mut self, request: &Request<'_>, until: Instant) -> Result<Response, HttpError> {
        self.is_over = true;
        self.send(request, until)?;
        let Head { status, location, body, mut is_last } = self.head(until)?;
        let body = match body {
            Body::Length(length) => self.take_exactly(length, until)?,
            Body::Chunks => {
                let mut whole = Vec::new();
                while let Some(chunk) = self.chunk(until)? {
                    whole.extend(chunk);
                    if whole.len() > self.answer_bytes_max {
                        return Err(HttpError::NoHttp("it is too long"));
                    }
                }
                whole
            }
            Body::UntilEnd => {
                is_last = true;
                self.take_all(until)?
            }
        };
        self.is_over = is_last;
        Ok(Response { status, location, body })
    }

    /// Sends a request whose answer comes in parts, without end. Returns the status.
    ///
    /// # Errors
    /// [`HttpError`].
    pub fn begin(&mut self, request: &Request<'_>, until: Instant) -> Result<u16, HttpError> {
        self.is_over = true;
        self.send(request, until)?;
        match self.head(until)? {
            Head { status, body: Body::Chunks, .. } => Ok(status),
            _ => Err(HttpError::NoHttp("a watch is answered in chunks")),
        }
    }

    fn send(&mut self, request: &Request<'_>, until: Instant) -> Result<(), HttpError> {
        let Request { path, token, headers, body } = *request;
        let mut lines = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n",
            self.host,
            body.len()
        );
        let token =
            token.filter(|token| token.chars().all(|c| c.is_ascii_graphic())).map(|token| ("Authorization", token));
        for (name, value) in headers.iter().copied().chain(token) {
            lines += &format!("{name}: {value}\r\n");
        }
        let mut bytes = (lines + "\r\n").into_bytes();
        bytes.extend(body);
        self.write(&bytes, until)
    }

    /// Writes all before a time, also where it is taken bit by bit.
    fn write(&mut self, bytes: &[u8], until: Instant) -> Result<(), HttpError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let left = left(until)?;
            self.socket().set_write_timeout(Some(left)).map_err(HttpError::Io)?;
            self.socket().set_read_timeout(Some(left)).map_err(HttpError::Io)?;
            let written = match &mut self.stream {
                Stream::Plain(socket) => socket.write(rest),
                Stream::Tls(stream) => {
                    let part = &rest[..rest.len().min(WRITE_BYTES)];
                    stream.write_all(part).and_then(|()| stream.flush()).map(|()| part.len())
                }
            };
            match written {
                Ok(0) => return Err(HttpError::Ended),
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(of_io(error)),
            }
        }
        Ok(())
    }

    /// Reads more.
    fn fill(&mut self, until: Instant) -> Result<(), HttpError> {
        self.socket().set_read_timeout(Some(left(until)?)).map_err(HttpError::Io)?;
        let mut bytes = [0; READ_BYTES];
        let read = match &mut self.stream {
            Stream::Plain(socket) => socket.read(&mut bytes),
            Stream::Tls(stream) => stream.read(&mut bytes),
        };
        match read {
            Ok(0) => Err(HttpError::Ended),
            Ok(count) => {
                self.buffer.extend(&bytes[..count]);
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(of_io(error)),
        }
    }

    fn head(&mut self, until: Instant) -> Result<Head, HttpError> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
            let mut response = httparse::Response::new(&mut headers);
            let parsed = response.parse(&self.buffer).map_err(|_| HttpError::NoHttp("its first lines"))?;
            if let httparse::Status::Complete(bytes) = parsed {
                let status = response.code.ok_or(HttpError::NoHttp("it has no status"))?;
                let of = |name: &str| {
                    let header = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
                    header.and_then(|header| std::str::from_utf8(header.value).ok()).map(str::trim)
                };
                let is_chunked = of("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
                let body = match (is_chunked, of("content-length")) {
                    // These have none, whatever they say.
                    _ if matches!(status, 100..=199 | 204 | 304) => Body::Length(0),
                    (true, _) => Body::Chunks,
                    (false, Some(length)) => {
                        let length = length.parse().ok().filter(|length| *length <= self.answer_bytes_max);
                        Body::Length(length.ok_or(HttpError::NoHttp("its length"))?)
                    }
                    (false, None) => Body::UntilEnd,
                };
                let is_last = of("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
                let location = of("location").map(str::to_owned);
                self.buffer.drain(..bytes);
                return Ok(Head { status, location, body, is_last });
            }
            if self.buffer.len() > HEAD_BYTES_MAX {
                return Err(HttpError::NoHttp("its first lines are too long"));
            }
            self.fill(until)?;
        }
    }

    fn take_exactly(&mut self, count: usize, until: Instant) -> Result<Vec<u8>, HttpError> {
        while self.buffer.len() < count {
            self.fill(until)?;
        }
        Ok(self.buffer.drain(..count).collect())
    }

    fn take_all(&mut self, until: Instant) -> Result<Vec<u8>, HttpError> {
        loop {
            match self.fill(until) {
                Ok(()) if self.buffer.len() > self.answer_bytes_max => return Err(HttpError::NoHttp("it is too long")),
                Ok(()) => {}
                Err(HttpError::Ended) => return Ok(std::mem::take(&mut self.buffer)),
                Err(error) => return Err(error),
            }
        }
    }

    /// The next part of an answer in chunks; `None` behind the last one. A part of one that has not come whole when the time is over stays
    /// for the next call.
    ///
    /// # Errors
    /// [`HttpError`].
    pub fn chunk(&mut self, until: Instant) -> Result<Option<Vec<u8>>, HttpError> {
        loop {
            let parsed = httparse::parse_chunk_size(&self.buffer);
            match parsed.map_err(|_| HttpError::NoHttp("a chunk's first line"))? {
                httparse::Status::Complete((_, 0)) => return self.trailers(until).map(|()| None),
                httparse::Status::Complete((_, size)) if size > self.answer_bytes_max as u64 => {
                    return Err(HttpError::NoHttp("a chunk is too long"));
                }
                httparse::Status::Complete((start, size)) => {
                    let end = start + size as usize;
                    if self.buffer.len() >= end + 2 {
                        let chunk = self.buffer[start..end].to_vec();
                        self.buffer.drain(..end + 2);
                        return Ok(Some(chunk));
                    }
                }
                httparse::Status::Partial if self.buffer.len() > HEAD_BYTES_MAX => {
                    return Err(HttpError::NoHttp("a chunk's first line is too long"));
                }
                httparse::Status::Partial => {}
            }
            self.fill(until)?;
        }
    }

    /// The lines behind the last chunk, to the empty one.
    fn trailers(&mut self, until: Instant) -> Result<(), HttpError> {
        let first = self.take_line(until)?;
        debug_assert!(first.starts_with(b"0"));
        while !self.take_line(until)?.is_empty() {}
        Ok(())
    }

    fn take_line(&mut self, until: Instant) -> Result<Vec<u8>, HttpError> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let line = self.buffer[..end].to_vec();
                self.buffer.drain(..end + 2);
                return Ok(line);
            }
            if self.buffer.len() > HEAD_BYTES_MAX {
                return Err(HttpError::NoHttp("a line is too long"));
            }
            self.fill(until)?;
        }
    }
}

fn left(until: Instant) -> Result<Duration, HttpError> {
    // Sockets take no time-out of zero.
    let left = until.saturating_duration_since(Instant::now());
    if left < Duration::from_micros(1) { Err(HttpError::Late) } else { Ok(left) }
}

fn of_io(error: io::Error) -> HttpError {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => HttpError::Late,
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => HttpError::Ended,
        // rustls puts its errors there.
        ErrorKind::InvalidData => HttpError::Refused(error.to_string()),
        _ => HttpError::Io(error),
    }
}
