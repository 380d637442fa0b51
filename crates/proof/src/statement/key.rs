//! Keys in PEM files as OpenSSL writes them: Ed25519 (`openssl genpkey -algorithm ed25519`) and
//! ECDSA on the curve P-256 (`openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256`), a
//! private key in PKCS#8, or in SEC1 for ECDSA, a public key as SubjectPublicKeyInfo.
//!
//! ECDSA signs SHA-256 with the nonce of RFC 6979, so both kinds give one signature for a message,
//! and needs no random numbers. Its signatures are DER, as other tools of DSSE expect.

use super::base64;
use crate::error::FileError;
use crate::hash::Hash;
use crate::regular;
use ed25519_dalek::{Signer, Verifier};
use p256::ecdsa;
use p256::pkcs8::{DecodePrivateKey, DecodePublicKey};
use std::path::Path;

/// BOUND: bytes of a PEM file.
const BYTES_MAX: u64 = 1 << 14;
/// What comes before the 32 bytes of an Ed25519 key: it has one DER form only (RFC 8410).
const PRIVATE: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
const PUBLIC: [u8; 12] = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];

const ENCRYPTED: &str = "the key is encrypted; `openssl pkey -in KEY -out PLAIN` decrypts it";
const PRIVATE_GIVEN: &str = "it is a private key, which only the signer should have; checking takes the public one";

/// A key that signs.
pub enum PrivateKey {
    Ed25519(ed25519_dalek::SigningKey),
    EcdsaP256(ecdsa::SigningKey),
}

/// A key that checks signatures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublicKey {
    Ed25519(ed25519_dalek::VerifyingKey),
    EcdsaP256(ecdsa::VerifyingKey),
}

impl PrivateKey {
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let text = regular::read_text(path, BYTES_MAX)?;
        Self::parse(&text).ok_or_else(|| {
            let is_encrypted = text.contains("ENCRYPTED");
            let what = if is_encrypted { ENCRYPTED } else { "it is not an Ed25519 or ECDSA P-256 private key in PEM" };
            FileError::malformed(path, what)
        })
    }

    /// From the text of a PEM file.
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(der) = pem(text, "PRIVATE KEY") {
            return match der.strip_prefix(&PRIVATE) {
                Some(key) => Some(Self::Ed25519(ed25519_dalek::SigningKey::from_bytes(key.try_into().ok()?))),
                None => ecdsa::SigningKey::from_pkcs8_der(&der).ok().map(Self::EcdsaP256),
            };
        }
        let key = p256::SecretKey::from_sec1_der(&pem(text, "EC PRIVATE KEY")?).ok()?;
        Some(Self::EcdsaP256(key.into()))
    }

    pub fn public(&self) -> PublicKey {
        match self {
            Self::Ed25519(key) => PublicKey::Ed25519(key.verifying_key()),
            Self::EcdsaP256(key) => PublicKey::EcdsaP256(*key.verifying_key()),
        }
    }

    pub(super) fn sign(&self, message: &[u8]) -> Vec<u8> {
        match self {
            Self::Ed25519(key) => key.sign(message).to_bytes().to_vec(),
            Self::EcdsaP256(key) => {
                let signature: ecdsa::Signature = key.sign(message);
                signature.to_der().as_bytes().to_vec()
            }
        }
    }
}

impl PublicKey {
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let text = regular::read_text(path, BYTES_MAX)?;
        Self::parse(&text).ok_or_else(|| {
            let is_private = PrivateKey::parse(&text).is_some();
            let what = if is_private { PRIVATE_GIVEN } else { "it is not an Ed25519 or ECDSA P-256 public key in PEM" };
            FileError::malformed(path, what)
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let der = pem(text, "PUBLIC KEY")?;
        let Some(key) = der.strip_prefix(&PUBLIC) else {
            return ecdsa::VerifyingKey::from_public_key_der(&der).ok().map(Self::EcdsaP256);
        };
        let key = ed25519_dalek::VerifyingKey::from_bytes(key.try_into().ok()?).ok()?;
        Some(Self::Ed25519(key)).filter(|_| !key.is_weak())
    }

    /// Names the key: the first digits of BLAKE3 of its 32 bytes, or of its point, not compressed.
    pub fn id(&self) -> String {
        let hash = match self {
            Self::Ed25519(key) => Hash::of_bytes(key.as_bytes()),
            Self::EcdsaP256(key) => Hash::of_bytes(key.to_sec1_point(false).as_bytes()),
        };
        hash.to_string()[..32].to_string()
    }

    pub(super) fn accepts(&self, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Ed25519(key) => ed25519_dalek::Signature::from_slice(signature)
                .is_ok_and(|signature| key.verify_strict(message, &signature).is_ok()),
            Self::EcdsaP256(key) => {
                ecdsa::Signature::from_der(signature).is_ok_and(|signature| key.verify(message, &signature).is_ok())
            }
        }
    }
}

/// The DER in a PEM file. Other parts of the file, such as the parameters of a curve, are skipped.
fn pem(text: &str, label: &str) -> Option<Vec<u8>> {
    let (begin, end) = (format!("-----BEGIN {label}-----"), format!("-----END {label}-----"));
    let body = text.split_once(&begin)?.1.split_once(&end)?.0;
    base64::decode(&body.split_whitespace().collect::<String>())
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
        assert!(PublicKey::read(&private).expect_err("for the signer alone").to_string().contains("private key"));
        assert!(key.public().accepts(b"", &signature));
        assert!(!key.public().accepts(b"x", &signature) && !key.public().accepts(b"", &signature[..63]));
        for bad in ["", "-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----", &PUBLIC_PEM.replace("MCow", "MCox")] {
            assert_eq!(PublicKey::read(&put("bad", bad)).expect_err("no key").exit_code(), 8);
        }
        assert!(PrivateKey::read(&public).is_err());
    }

    /// The key of RFC 6979, A.2.5, in the forms that OpenSSL gives it, and its signature of
    /// `sample`.
    const EC_PRIVATE: &str = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgya+p2EW6dRZrXCFX\nZ7HWk05Qw9s26JsSe4piKxIPZyGhRANCAARg/tS6JVqdMclh63TGNW1owEm4kjth\n+mzmaWIuYPKftnkD/hAIuLyZpBrp6VYovGTy8bIMLX6fUXejwpTURiKZ\n-----END PRIVATE KEY-----\n";
    const EC_SEC1: &str = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIMmvqdhFunUWa1whV2ex1pNOUMPbNuibEnuKYisSD2choAoGCCqGSM49\nAwEHoUQDQgAEYP7UuiVanTHJYet0xjVtaMBJuJI7Yfps5mliLmDyn7Z5A/4QCLi8\nmaQa6elWKLxk8vGyDC1+n1F3o8KU1EYimQ==\n-----END EC PRIVATE KEY-----\n";
    const EC_PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEYP7UuiVanTHJYet0xjVtaMBJuJI7\nYfps5mliLmDyn7Z5A/4QCLi8maQa6elWKLxk8vGyDC1+n1F3o8KU1EYimQ==\n-----END PUBLIC KEY-----\n";
    const EC_SIGNATURE: &str = "3046022100efd48b2aacb6a8fd1140dd9cd45e81d69d2c877b56aaf991c34d0ea84eaf3716022100f7cb1c942d657c41d436c7a1b6e29f65f3e900dbb9aff4064dc4ab2f843acda8";

    #[test]
    fn ecdsa_keys_are_read_and_sign_as_the_standard_says() {
        let key = PrivateKey::parse(EC_PRIVATE).expect("a key");
        let signature = key.sign(b"sample");
        let digits: Vec<_> = signature.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digits.concat(), EC_SIGNATURE);
        assert_eq!(PrivateKey::parse(EC_SEC1).expect("the same key").public(), key.public());
        assert_eq!(PublicKey::parse(EC_PUBLIC).expect("a key"), key.public());
        assert!(key.public().accepts(b"sample", &signature));
        assert!(!key.public().accepts(b"simple", &signature));
        // Not DER, cut off, with a byte more, and of the other kind.
        let ed25519 = PrivateKey::parse(PRIVATE_PEM).expect("a key");
        let (longer, other) = ([&signature[..], &[0]].concat(), ed25519.sign(b"sample"));
        for bad in [&signature[8..], &signature[..71], &longer[..], &other[..]] {
            assert!(!key.public().accepts(b"sample", bad));
        }
        assert!(!ed25519.public().accepts(b"sample", &signature));
        assert_ne!(ed25519.public().id(), key.public().id());
        for bad in [
            EC_PUBLIC.replace("MFkw", "MFkx"),
            EC_PUBLIC.replace("EYP7U", "EYP7V"),
            EC_PRIVATE.replace("IBAQQg", "IBAgQg"),
        ] {
            assert!(PublicKey::parse(&bad).is_none() && PrivateKey::parse(&bad).is_none(), "{bad}");
        }
    }
}
