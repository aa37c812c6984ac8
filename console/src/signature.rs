//! Signature of an act, as a request's `Authorization` has it: `mccs id="…", nonce="…", mac="…"`. Pure. The service judges it.

use hyper::{HeaderMap, header};
use mccs_control::acts::SignedAct;

/// Digits of an id, a nonce and a MAC: none is longer.
const DIGITS_MAX: usize = 64;

/// Why there is no signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoSignature {
    /// Nothing was said.
    Absent,
    /// It is none.
    Malformed,
}

/// The act `body` with its signature.
///
/// # Errors
/// [`NoSignature`].
pub fn signed(headers: &HeaderMap, body: String) -> Result<SignedAct, NoSignature> {
    let mut all = headers.get_all(header::AUTHORIZATION).iter();
    let text = all.next().ok_or(NoSignature::Absent)?;
    let text = text.to_str().ok().filter(|_| all.next().is_none()).ok_or(NoSignature::Malformed)?;
    let [id, nonce, mac] = parts(text).ok_or(NoSignature::Malformed)?.map(str::to_owned);
    Ok(SignedAct { id, nonce, mac, body })
}

/// Id, nonce and MAC, each once, in any order.
fn parts(text: &str) -> Option<[&str; 3]> {
    let (scheme, rest) = text.split_once(' ')?;
    let mut found = [None; 3];
    if !scheme.eq_ignore_ascii_case("mccs") {
        return None;
    }
    for part in rest.split(',') {
        let (name, value) = part.trim().split_once('=')?;
        let value = value.strip_prefix('"')?.strip_suffix('"')?;
        let place = ["id", "nonce", "mac"].iter().position(|own| *own == name)?;
        let is_plain = value.len() <= DIGITS_MAX && value.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_plain || found[place].replace(value).is_some() {
            return None;
        }
    }
    let [Some(id), Some(nonce), Some(mac)] = found else { return None };
    Some([id, nonce, mac])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_has_three_parts_and_nothing_else() {
        let whole = [Some("a1"), Some("b2"), Some("c3")].map(Option::unwrap);
        for text in ["mccs id=\"a1\", nonce=\"b2\", mac=\"c3\"", "MCCS mac=\"c3\",nonce=\"b2\",id=\"a1\""] {
            assert_eq!(parts(text), Some(whole), "{text}");
        }
        let long = format!("mccs id=\"{}\", nonce=\"b2\", mac=\"c3\"", "a".repeat(65));
        for text in [
            "",
            "mccs",
            "Bearer abc",
            "mccs id=\"a1\", nonce=\"b2\"",
            "mccs id=\"a1\", id=\"a1\", nonce=\"b2\", mac=\"c3\"",
            "mccs id=\"a1\", nonce=\"b2\", mac=\"c3\", x=\"1\"",
            "mccs id=a1, nonce=b2, mac=c3",
            "mccs id=\"a1\\n\", nonce=\"b2\", mac=\"c3\"",
            "mccs id=\"a\"1\", nonce=\"b2\", mac=\"c3\"",
            &long,
        ] {
            assert_eq!(parts(text), None, "{text}");
        }
    }

    #[test]
    fn two_headers_are_no_signature() {
        let mut headers = HeaderMap::new();
        assert_eq!(signed(&headers, String::new()), Err(NoSignature::Absent));
        let text = header::HeaderValue::from_static("mccs id=\"a1\", nonce=\"b2\", mac=\"c3\"");
        headers.append(header::AUTHORIZATION, text.clone());
        assert_eq!(signed(&headers, "x".into()).map(|signed| signed.body), Ok("x".to_owned()));
        headers.append(header::AUTHORIZATION, text);
        assert_eq!(signed(&headers, String::new()), Err(NoSignature::Malformed));
    }
}
