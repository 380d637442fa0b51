//! Ed25519 keys in PEM files as `openssl genpkey -algorithm ed25519` writes them: a private key in
//! PKCS#8, a public key as SubjectPublicKeyInfo. Both have one DER form only (RFC 8410).

use super::base64;
use crate::error::FileError;
use crate::hash::Hash;
use crate::regular;
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use std::path::Path;

/// BOUND: bytes of a PEM file.
const BYTES_MAX: u64 = 1 << 14;
/// What comes before the 32 bytes of a key.
const PRIVATE: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
const PUBLIC: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];

/// A key that signs.
pub struct PrivateKey(SigningKey);

/// A key that checks signatures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

impl PrivateKey {
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let bytes = pem(path, "PRIVATE KEY", &PRIVATE)?;
        Ok(Self(SigningKey::from_bytes(&bytes)))
    }

    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }

    pub(super) fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.0.sign(message).to_bytes()
    }
}

impl PublicKey {
    /// Reads a public key, or takes that of a private key.
    pub fn read(path: &Path) -> Result<Self, FileError> {
        match pem(path, "PUBLIC KEY", &PUBLIC) {
            Ok(bytes) => {
                let key = VerifyingKey::from_bytes(&bytes).ok().filter(|key| !key.is_weak());
                key.map(Self).ok_or_else(|| FileError::malformed(path, "it is not a point of the curve"))
            }
            Err(error) => PrivateKey::read(path).map(|key| key.public()).map_err(|_| error),
        }
    }

    /// Names the key: the first digits of BLAKE3 of its 32 bytes.
    pub fn id(&self) -> String {
        Hash::of_bytes(self.0.as_bytes()).to_string()[..32].to_string()
    }

    pub(super) fn accepts(&self, message: &[u8], signature: &[u8]) -> bool {
        Signature::from_slice(signature).is_ok_and(|signature| self.0.verify_strict(message, &signature).is_ok())
    }
}

/// The 32 bytes of a key.
fn pem(path: &Path, label: &str, before: &[u8]) -> Result<[u8; 32], FileError> {
    let text = regular::read_text(path, BYTES_MAX)?;
    let wrong = || {
        let what = format!("it is not an Ed25519 {} in PEM", label.to_lowercase());
        FileError::malformed(path, what)
    };
    let (begin, end) = (format!("-----BEGIN {label}-----"), format!("-----END {label}-----"));
    let body = text.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end)).ok_or_else(wrong)?.0;
    let body: String = body.split_whitespace().collect();
    let bytes = base64::decode(&body).ok_or_else(wrong)?;
    bytes.strip_prefix(before).and_then(|key| key.try_into().ok()).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first test vector of RFC 8032, section 7.1, in the forms that OpenSSL gives it.
    const PRIVATE_PEM: &str = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n-----END PRIVATE KEY-----\n";
    const PUBLIC_PEM: &str = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n-----END PUBLIC KEY-----\n";

    #[test]
    fn keys_are_read_and_sign_as_the_standard_says() {
        let folder = tempfile::tempdir().expect("folder");
        let put = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let (private, public) = (put("key", PRIVATE_PEM), put("public", PUBLIC_PEM));
        let key = PrivateKey::read(&private).expect("a key");
        let signature = key.sign(b"");
        assert_eq!(signature[..4], [0xe5, 0x56, 0x43, 0x00]);
        assert_eq!(PublicKey::read(&public).expect("a key"), key.public());
        assert_eq!(PublicKey::read(&private).expect("its public key"), key.public());
        assert!(key.public().accepts(b"", &signature));
        assert!(!key.public().accepts(b"x", &signature) && !key.public().accepts(b"", &signature[..63]));
        for bad in ["", "-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----", &PUBLIC_PEM.replace("MCow", "MCox")] {
            assert_eq!(PublicKey::read(&put("bad", bad)).expect_err("no key").exit_code(), 8);
        }
        assert!(PrivateKey::read(&public).is_err());
    }
}
