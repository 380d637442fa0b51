//! DSSE envelopes: a payload, its type, and signatures over both (the pre-authentication encoding
//! of DSSE version 1).

use super::base64;
use super::key::{PrivateKey, PublicKey};
use crate::atomic::write_atomically;
use crate::error::FileError;
use crate::json::{self, UniqueValue};
use crate::name::told;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";

/// BOUND: bytes of an envelope: a statement about 300,000 segments.
const BYTES_MAX: u64 = 1 << 25;
/// BOUND: signatures of an envelope. Each is tried with the key.
const SIGNATURES_MAX: usize = 100;

/// An envelope as it stands in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Envelope {
    payload: String,
    #[serde(rename = "payloadType")]
    payload_type: String,
    signatures: Vec<SignatureOf>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SignatureOf {
    /// DSSE makes it optional; nothing depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keyid: Option<String>,
    sig: String,
}

impl Envelope {
    /// Around a payload, signed if there is a key.
    pub fn new(payload: &[u8], key: Option<&PrivateKey>) -> Self {
        let signature = |key: &PrivateKey| SignatureOf {
            keyid: Some(key.public().id()),
            sig: base64::encode(&key.sign(&encoded(PAYLOAD_TYPE, payload))),
        };
        Self {
            payload: base64::encode(payload),
            payload_type: PAYLOAD_TYPE.to_string(),
            signatures: key.into_iter().map(signature).collect(),
        }
    }

    pub fn to_text(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings have a JSON form") + "\n"
    }

    pub fn write(&self, path: &Path) -> Result<(), FileError> {
        write_atomically(path, self.to_text().as_bytes())
    }

    pub fn read(path: &Path) -> Result<Self, FileError> {
        let UniqueValue(value) = json::read_within(path, BYTES_MAX)?;
        if !has_names(&value) {
            return Err(FileError::malformed(path, "it is not an object with fields of DSSE"));
        }
        let envelope: Self = serde_json::from_value(value).map_err(|error| FileError::malformed(path, told(&error)))?;
        if envelope.payload_type != PAYLOAD_TYPE {
            return Err(FileError::malformed(path, format!("its payload is not {PAYLOAD_TYPE}")));
        }
        if envelope.signatures.len() > SIGNATURES_MAX {
            return Err(FileError::malformed(path, format!("it has more than {SIGNATURES_MAX} signatures")));
        }
        Ok(envelope)
    }

    /// The payload; None if it is not base64.
    pub fn payload(&self) -> Option<Vec<u8>> {
        base64::decode(&self.payload)
    }

    pub fn is_signed(&self) -> bool {
        !self.signatures.is_empty()
    }

    /// Whether one of the signatures is of this key.
    pub fn is_signed_by(&self, key: &PublicKey) -> bool {
        let Some(payload) = self.payload() else { return false };
        let message = encoded(&self.payload_type, &payload);
        let mut signatures = self.signatures.iter().filter_map(|signature| base64::decode(&signature.sig));
        signatures.any(|signature| key.accepts(&message, &signature))
    }
}

/// Objects are objects here: a reader made by `serde` takes a list of values for one too, and null
/// for a field that is not there, which no other tool does.
fn has_names(value: &Value) -> bool {
    let is_one = |signature: &Value| signature.is_object() && !signature.get("keyid").is_some_and(Value::is_null);
    value.is_object() && value["signatures"].as_array().is_some_and(|all| all.iter().all(is_one))
}

/// What is signed: `DSSEv1`, and both parts with their lengths.
fn encoded(kind: &str, payload: &[u8]) -> Vec<u8> {
    let mut bytes = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    bytes.extend(payload);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_that_of_the_standard() {
        let kind = "http://example.com/HelloWorld";
        assert_eq!(encoded(kind, b"hello world"), b"DSSEv1 29 http://example.com/HelloWorld 11 hello world");
    }

    #[test]
    fn an_envelope_has_the_fields_of_the_standard_by_name() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("statement.json");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("written");
            Envelope::read(&path).is_ok()
        };
        let good = format!(r#"{{"payload":"e30=","payloadType":"{PAYLOAD_TYPE}","signatures":[{{"sig":"AAAA"}}]}}"#);
        assert!(read(&good));
        assert!(read(&good.replace(r#"{"sig""#, r#"{"keyid":"a","sig""#)));
        assert!(!read(&good.replace(r#"{"sig":"AAAA"}"#, r#"["a","AAAA"]"#)), "a list for a signature");
        assert!(!read(&good.replace(r#"{"sig""#, r#"{"keyid":null,"sig""#)), "no name of a key");
        assert!(!read(&format!(r#"["e30=","{PAYLOAD_TYPE}",[]]"#)), "a list for an envelope");
        assert!(!read(&good.replace(r#"{"payload""#, r#"{"payload":"e30=","payload""#)), "a field twice");
    }
}
