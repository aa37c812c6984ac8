use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread::JoinHandle;

use mccs_control::testing::overview;
use mccs_registry::Registry;
use mccs_runtime::{RuntimeOptions, Runtimes};
use mccs_tenants::AllSessions;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{metric::Data, number_data_point};

use super::super::prometheus::render;
use super::*;

/// By series.
type Values = BTreeMap<String, f64>;

/// Meaning and type of each metric.
type Types<Kind> = BTreeMap<String, (String, Kind)>;

fn labels(attributes: &[KeyValue]) -> Vec<(String, String)> {
    let text = |pair: &KeyValue| match pair.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(any_value::Value::StringValue(text)) => (pair.key.clone(), text.clone()),
        other => panic!("{}: {other:?}", pair.key),
    };
    attributes.iter().map(text).collect()
}

/// A series as Prometheus writes it.
fn series(name: &str, labels: &[(String, String)]) -> String {
    let escaped = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let labels: Vec<_> = labels.iter().map(|(label, text)| format!("{label}=\"{}\"", escaped(text))).collect();
    if labels.is_empty() { name.to_owned() } else { format!("{name}{{{}}}", labels.join(",")) }
}

/// Values of a push, by series, and the type of each metric.
fn told(request: &ExportMetricsServiceRequest) -> (Values, Types<&'static str>) {
    let (mut values, mut types) = (BTreeMap::new(), BTreeMap::new());
    let mut add = |series: String, value| assert!(values.insert(series.clone(), value).is_none(), "{series} twice");
    for metric in request.resource_metrics.iter().flat_map(|r| &r.scope_metrics).flat_map(|s| &s.metrics) {
        let name = &metric.name;
        let (kind, points) = match metric.data.as_ref().expect("data") {
            Data::Gauge(gauge) => ("gauge", &gauge.data_points),
            Data::Sum(sum) => {
                assert!(sum.is_monotonic && sum.aggregation_temporality == 2, "{name}");
                assert!(sum.data_points.iter().all(|point| point.start_time_unix_nano == 5));
                ("counter", &sum.data_points)
            }
            Data::Histogram(histogram) => {
                assert_eq!(histogram.aggregation_temporality, 2);
                for point in &histogram.data_points {
                    let own = labels(&point.attributes);
                    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
                    let mut so_far = 0;
                    for (at, count) in point.bucket_counts.iter().enumerate() {
                        so_far += count;
                        let bound = point.explicit_bounds.get(at).map_or("+Inf".into(), f64::to_string);
                        let labels = [own.clone(), vec![("le".into(), bound)]].concat();
                        add(series(&format!("{name}_bucket"), &labels), so_far as f64);
                    }
                    add(series(&format!("{name}_sum"), &own), point.sum.expect("a sum"));
                    add(series(&format!("{name}_count"), &own), point.count as f64);
                }
                ("histogram", &Vec::new())
            }
            other => panic!("{name}: {other:?}"),
        };
        for point in points {
            assert_eq!(point.time_unix_nano, 7, "{name}");
            let value = match point.value.expect("a value") {
                number_data_point::Value::AsInt(number) => number as f64,
                number_data_point::Value::AsDouble(number) => number,
            };
            add(series(name, &labels(&point.attributes)), value);
        }
        assert!(types.insert(name.clone(), (metric.description.clone(), kind)).is_none(), "{name} twice");
    }
    (values, types)
}

/// The same of the text for scrapers.
fn scraped(text: &str) -> (Values, Types<String>) {
    let (mut values, mut types, mut help) = (BTreeMap::new(), BTreeMap::new(), String::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            rest.split_once(' ').unwrap().1.clone_into(&mut help);
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            types.insert(name.to_owned(), (help.clone(), kind.to_owned()));
        } else {
            let (series, value) = line.rsplit_once(' ').unwrap();
            values.insert(series.to_owned(), value.parse().unwrap());
        }
    }
    (values, types)
}

#[test]
fn a_push_says_what_a_scrape_says() {
    let mut strange = overview();
    strange.tenants[0].tenant = "a\"}\\ \n{b=\"c\", ü".into();
    strange.lines_suppressed = u64::MAX;
    for overview in [overview(), strange] {
        let resource = Resource { attributes: BTreeMap::from([("k8s.cluster.name".into(), "east".into())]) };
        let body = encode(&overview, &resource, Times { since_ns: 5, now_ns: 7 });
        let request: ExportMetricsServiceRequest = serde_json::from_str(&body).expect("OTLP");
        let ((pushed, kinds), (scraped, expected)) = (told(&request), scraped(&render(&overview)));
        assert_eq!(pushed, scraped);
        let has_samples = |name: &&String| scraped.keys().any(|series| series.starts_with(name.as_str()));
        let expected: BTreeMap<_, _> = expected.iter().filter(|(name, _)| has_samples(name)).collect();
        assert!(expected.len() > 50);
        for (name, (help, kind)) in expected {
            assert_eq!(kinds.get(name), Some(&(help.clone(), kind.as_str())), "{name}");
        }
        let own = labels(&request.resource_metrics[0].resource.as_ref().expect("a resource").attributes);
        let expected = [
            ("service.name", "mccs-service"),
            ("service.version", "1"),
            ("service.instance.id", "h0"),
            ("host.name", "h0"),
            ("k8s.cluster.name", "east"),
        ];
        assert_eq!(own, expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
    }
}

#[test]
fn a_value_that_json_has_not_is_left_out() {
    let mut odd = overview();
    odd.communicators[0].kinds[0].busbw_gbps = f64::NAN;
    let body = encode(&odd, &Resource { attributes: BTreeMap::new() }, Times { since_ns: 5, now_ns: 7 });
    let request: ExportMetricsServiceRequest = serde_json::from_str(&body).expect("OTLP");
    let names = told(&request).1;
    assert!(!names.contains_key("nccl_bus_bandwidth_gbs") && names.contains_key("mccs_uptime_seconds"));
}

/// Ends the tests when one hangs before it drops this. Generous: it never decides about speed.
fn watchdog() -> Sender<()> {
    const HANGS_AFTER: Duration = Duration::from_secs(300);
    let (running, ended) = channel();
    std::thread::spawn(move || {
        if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(HANGS_AFTER) {
            // Not by macros, whose output the test harness keeps to itself.
            let _ = writeln!(std::io::stderr(), "watchdog: a test of pushes hangs");
            std::process::abort();
        }
    });
    running
}

/// A collector that answers connections in turn, each in its own way, and returns what it was sent.
fn collector(answers: Vec<Vec<u8>>) -> (String, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("http://{}/v1/metrics", listener.local_addr().unwrap());
    let serve = move |answer: Vec<u8>| {
        let (mut socket, _) = listener.accept().unwrap();
        let request = read_request(&mut socket);
        // Whoever has had enough of an answer ends the connection.
        let _ = socket.write_all(&answer);
        request
    };
    (url, std::thread::spawn(move || answers.into_iter().map(serve).collect()))
}

fn read_request(socket: &mut TcpStream) -> String {
    let mut text = Vec::new();
    loop {
        let whole = String::from_utf8_lossy(&text).into_owned();
        if let Some((head, body)) = whole.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
            if body.len() == length.parse::<usize>().unwrap() {
                return whole;
            }
        }
        let mut part = [0; 4096];
        let count = socket.read(&mut part).unwrap();
        assert!(count > 0, "a request has an end");
        text.extend_from_slice(&part[..count]);
    }
}

fn pusher(url: &str) -> Push {
    let options = RuntimeOptions { spin: Duration::ZERO, spin_while_waiting: Duration::ZERO, budget: 1 };
    let (registry, runtimes) = (Arc::new(Registry::default()), Runtimes::new(options));
    let overseer = Overseer {
        host: "h".into(),
        since: Instant::now(),
        registry,
        runtimes,
        all_sessions: AllSessions::at_most(64),
    };
    let interval = mccs_config::DurationText::secs(1);
    Push::new(&Otlp { url: url.parse().unwrap(), interval, attributes: BTreeMap::new() }, overseer)
}

fn answer(head: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {head}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// Pushes once; what became of it.
fn pushed(push: &mut Push) -> Option<String> {
    push.push();
    push.overseer.registry.pushes().unwrap().trouble
}

#[test]
fn a_collector_that_refuses_is_counted_and_later_pushes_go_on() {
    let _watchdog = watchdog();
    let huge = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 1u64 << 40).into_bytes();
    let mut endless = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
    endless.extend(vec![b'x'; 2 * ANSWER_BYTES_MAX]);
    let rejects = "{\"partialSuccess\": {\"rejectedDataPoints\": \"3\", \"errorMessage\": \"too\\nold\"}}";
    let (url, collector) = collector(vec![
        answer("200 OK", "{}"),
        answer("500 Internal Server Error", "no\r\nroom"),
        answer("200 OK", rejects),
        answer("308 Permanent Redirect\r\nLocation: http://other:1/v1/metrics", ""),
        huge,
        endless,
        b"220 ready\r\n".to_vec(),
        Vec::new(),
        b"HTTP/1.1 204 No Content\r\n\r\n".to_vec(),
        answer("200 OK", "{\"partialSuccess\": null}"),
    ]);
    let mut push = pusher(&url);
    let expected = [
        None,
        Some("answers 500: no  room"),
        Some("rejected 3 data points: too old"),
        Some("is at http://other:1/v1/metrics"),
        Some("length"),
        Some("too long"),
        Some("no HTTP"),
        Some("has ended"),
        None,
        None,
    ];
    for expected in expected {
        let trouble = pushed(&mut push);
        match expected {
            None => assert_eq!(trouble, None),
            Some(part) => assert!(trouble.as_ref().is_some_and(|why| why.contains(part)), "{part}: {trouble:?}"),
        }
        // Nothing is left of an answer, and a connection that its collector has ended is not used again.
        push.connection = None;
    }
    let pushes = push.overseer.registry.pushes().unwrap();
    assert_eq!((pushes.accepted, pushes.failed), (3, 7));
    for request in collector.join().unwrap() {
        let (head, body) = request.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("POST /v1/metrics HTTP/1.1\r\n"), "{head}");
        assert!(head.contains("Content-Type: application/json"), "{head}");
        serde_json::from_str::<ExportMetricsServiceRequest>(body).expect("OTLP");
    }
}

#[test]
fn a_collector_that_is_down_or_silent_costs_a_push_its_time_and_no_more() {
    let _watchdog = watchdog();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("http://{}/v1/metrics", listener.local_addr().unwrap());
    let mut push = pusher(&url);
    assert_eq!(pushed(&mut push).as_deref(), Some("no answer in time"));
    drop(listener);
    assert!(pushed(&mut push).is_some_and(|why| why.contains("refused")));
    assert_eq!(push.overseer.registry.pushes().unwrap().failed, 2);
}

#[test]
fn a_pusher_pushes_until_it_is_dropped() {
    let _watchdog = watchdog();
    let (url, collector) = collector(vec![answer("200 OK", "{}"); 2]);
    let Push { overseer, .. } = pusher(&url);
    let otlp = Otlp {
        url: url.parse().unwrap(),
        interval: mccs_config::DurationText::millis(10),
        attributes: BTreeMap::new(),
    };
    let pusher = OtlpPusher::start(&otlp, overseer, Arc::default()).unwrap();
    assert_eq!(collector.join().unwrap().len(), 2);
    drop(pusher);
}
