//! Routes: what a path asks for. Pure.

use hyper::Method;
use mccs_control::documents::Document;

/// Path of the API.
pub const API: &str = "/api/v1";
/// A trace's length where the query names none.
const TRACE_SECONDS: f64 = 1.0;
/// Longest trace: the console keeps it until it is sent.
pub const TRACE_SECONDS_MAX: f64 = 10.0;

/// A resource that is asked for.
#[derive(Debug, Clone, PartialEq)]
pub enum Route {
    /// A file of the page, by its name.
    Page(String),
    /// A document of the service's.
    Document(Document),
    /// Changes that the policy in the request's body would make.
    Diff,
    /// An act that the holder of a token has signed.
    Act,
    /// A trace.
    Trace {
        /// How long.
        seconds: f64,
        /// One communicator's number.
        communicator: Option<u64>,
    },
    /// The description of the API.
    Description,
    /// Nothing here.
    NotFound,
    /// A query that cannot be: why.
    BadQuery(&'static str),
    /// Another method than this one.
    MethodNotAllowed(&'static str),
}

/// Documents with a path of their own, and the command of `mccsctl` that prints each.
pub const DOCUMENTS: [(&str, &str, Document); 14] = [
    ("show", "show", Document::Show),
    ("hosts", "hosts", Document::Hosts),
    ("gpus", "gpus", Document::Gpus),
    ("sessions", "sessions", Document::Sessions),
    ("communicators", "communicators", Document::Communicators),
    ("joining", "joining", Document::Joining),
    ("failed", "failed", Document::Failed),
    ("engines", "engines", Document::Engines),
    ("overview", "watch", Document::Overview),
    ("flows", "flows", Document::Flows),
    ("links", "links", Document::Links),
    ("cluster", "cluster", Document::Cluster),
    ("stuck", "stuck", Document::Stuck),
    ("policy", "policy show", Document::Policy),
];

/// The resource that a request asks for.
#[must_use]
pub fn route(method: &Method, path: &str, query: &str) -> Route {
    let Some(rest) = path.strip_prefix(API).filter(|rest| rest.is_empty() || rest.starts_with('/')) else {
        let page =
            Route::Page(if path == "/" { "index.html".to_owned() } else { path.trim_start_matches('/').to_owned() });
        return reads(method, page);
    };
    let words: Vec<&str> = rest.split('/').skip(1).collect();
    match words[..] {
        ["openapi.json"] => reads(method, Route::Description),
        ["policy", "history"] => match query {
            "" => reads(method, Route::Document(Document::History { acts: false })),
            "acts=true" => reads(method, Route::Document(Document::History { acts: true })),
            _ => Route::BadQuery("a history takes acts=true, or nothing"),
        },
        ["policy", "diff"] if *method == Method::POST => Route::Diff,
        ["trace"] if *method == Method::POST => trace(query),
        ["acts"] if *method == Method::POST => Route::Act,
        ["policy", "diff"] | ["trace"] | ["acts"] => Route::MethodNotAllowed("POST"),
        ["communicators", number, which @ ("why-stuck" | "accounts")] => match number.parse() {
            Ok(number) if which == "accounts" => reads(method, Route::Document(Document::Accounts(number))),
            Ok(number) => reads(method, Route::Document(Document::WhyStuck(number))),
            Err(_) => Route::NotFound,
        },
        [name] => match DOCUMENTS.iter().find(|(own, ..)| *own == name) {
            Some((.., document)) => reads(method, Route::Document(document.clone())),
            None => Route::NotFound,
        },
        _ => Route::NotFound,
    }
}

fn reads(method: &Method, route: Route) -> Route {
    if method == Method::GET { route } else { Route::MethodNotAllowed("GET") }
}

fn trace(query: &str) -> Route {
    let (mut seconds, mut communicator) = (TRACE_SECONDS, None);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("seconds", text)) => match text.parse::<f64>() {
                Ok(value) if value > 0.0 && value <= TRACE_SECONDS_MAX => seconds = value,
                _ => return Route::BadQuery("seconds is more than 0, and 10 at most"),
            },
            Some(("communicator", text)) => match text.parse() {
                Ok(number) => communicator = Some(number),
                Err(_) => return Route::BadQuery("communicator is a number, as communicators has it"),
            },
            _ => return Route::BadQuery("a trace takes seconds and communicator"),
        }
    }
    Route::Trace { seconds, communicator }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lead_where_they_say() {
        let get = |path: &str, query: &str| route(&Method::GET, path, query);
        assert_eq!(get("/", ""), Route::Page("index.html".into()));
        assert_eq!(get("/page/app.js", ""), Route::Page("page/app.js".into()));
        assert_eq!(get("/api/v1/overview", ""), Route::Document(Document::Overview));
        assert_eq!(get("/api/v1/communicators/7/why-stuck", ""), Route::Document(Document::WhyStuck(7)));
        assert_eq!(get("/api/v1/policy/history", "acts=true"), Route::Document(Document::History { acts: true }));
        for path in ["/api/v1", "/api/v1/", "/api/v1/x", "/api/v1/overview/", "/api/v1//overview", "/api/v1x/overview"]
        {
            assert!(!matches!(get(path, ""), Route::Document(_)), "{path}");
        }
        for number in ["-1", "x", "", "18446744073709551616", "+"] {
            assert_eq!(get(&format!("/api/v1/communicators/{number}/accounts"), ""), Route::NotFound, "{number}");
        }
        assert!(matches!(get("/api/v1/policy/history", "acts=yes"), Route::BadQuery(_)));
    }

    #[test]
    fn only_what_takes_long_is_posted() {
        let post = |path: &str, query: &str| route(&Method::POST, path, query);
        assert_eq!(post("/api/v1/trace", ""), Route::Trace { seconds: 1.0, communicator: None });
        let asked = post("/api/v1/trace", "communicator=7&seconds=2.5");
        assert_eq!(asked, Route::Trace { seconds: 2.5, communicator: Some(7) });
        for query in ["seconds=0", "seconds=NaN", "seconds=11", "seconds=inf", "seconds", "communicator=x", "x=1"] {
            assert!(matches!(post("/api/v1/trace", query), Route::BadQuery(_)), "{query}");
        }
        for path in ["/", "/api/v1/overview", "/api/v1/policy/history"] {
            assert_eq!(post(path, ""), Route::MethodNotAllowed("GET"), "{path}");
        }
        assert_eq!(post("/api/v1/acts", ""), Route::Act);
        for path in ["/api/v1/trace", "/api/v1/policy/diff", "/api/v1/acts"] {
            assert_eq!(route(&Method::GET, path, ""), Route::MethodNotAllowed("POST"));
            assert_eq!(route(&Method::DELETE, path, ""), Route::MethodNotAllowed("POST"));
        }
    }
}
