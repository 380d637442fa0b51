#!/usr/bin/env python3
"""Checks a statement of `isobit prove` without Isobit: the signature, the files of the final folder,
and that the receipt beside them is the one that the statement is about.

    verify_statement.py statement.json FINAL_FOLDER [--key public.pem]

Needs the standard library, and `cryptography` for the signature (Ed25519, or ECDSA with P-256). It does not replay anything: what
was replayed, and by whose choice, is printed.
"""

import argparse
import base64
import hashlib
import json
import pathlib
import sys


def fail(what):
    print(f"not verified: {what}")
    sys.exit(1)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def parsed(text):
    """JSON in which no object has a key twice: readers would disagree about its value."""

    def unique(pairs):
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def check_signature(envelope, payload, key_file):
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = load_pem_public_key(pathlib.Path(key_file).read_bytes())
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        more = (ec.ECDSA(SHA256()),)
    elif isinstance(key, ed25519.Ed25519PublicKey):
        more = ()
    else:
        fail("the key is neither Ed25519 nor ECDSA with P-256")
    kind = envelope["payloadType"].encode()
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    for signature in envelope["signatures"]:
        try:
            key.verify(base64.b64decode(signature["sig"], validate=True), message, *more)
            return
        except (InvalidSignature, ValueError):
            continue
    fail("no signature of the statement is of this key")


def main():
    parser = argparse.ArgumentParser(description="checks a statement of isobit prove")
    parser.add_argument("statement")
    parser.add_argument("folder", help="the final folder that the statement is about")
    parser.add_argument("--key", help="public key in PEM that must have signed it")
    arguments = parser.parse_args()

    envelope = parsed(pathlib.Path(arguments.statement).read_text())
    if envelope["payloadType"] != "application/vnd.in-toto+json":
        fail("the payload is not an in-toto statement")
    payload = base64.b64decode(envelope["payload"], validate=True)
    if arguments.key:
        check_signature(envelope, payload, arguments.key)

    statement = parsed(payload)
    if statement["_type"] != "https://in-toto.io/Statement/v1":
        fail("unknown type of statement")
    if statement["predicateType"] != "https://slsa.dev/provenance/v1":
        fail("unknown type of predicate")
    folder = pathlib.Path(arguments.folder)
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    if len(subjects) < len(statement["subject"]):
        fail("the statement names a file twice")
    for name, digest in sorted(subjects.items()):
        if pathlib.PurePath(name).name != name:
            fail(f"{name!r} is not a file of the folder")
        if not (folder / name).is_file():
            fail(f"{folder / name} is missing")
        if sha256(folder / name) != digest:
            fail(f"{folder / name} is not the file that the statement is about")
    for path in sorted(folder.iterdir()):
        if path.name not in subjects and path.name not in ("MANIFEST.json", "model.sig"):
            fail(f"{path} is not in the statement")

    receipt = parsed((folder / "receipt.json").read_text())
    details = statement["predicate"]["runDetails"]
    if receipt["digest"] != details["metadata"]["invocationId"]:
        fail("the receipt is not the one that the statement is about")
    chains = [item["digest"]["blake3"] for item in details["byproducts"] if item["name"] == "chain"]
    if chains != [receipt["made"]["link"]]:
        fail("the chain is not the one that the statement is about")

    again = statement["predicate"]["isobit_reexecution"]
    done = [part for part in again["segments"] if part["reexecuted"]]
    signed = "signed by the given key" if arguments.key else "signature not checked"
    print(f"verified: {len(subjects)} files, {signed}")
    print(f"receipt {receipt['digest']}")
    print(f"replayed: {again['reexecuted_updates']} of {again['updates']} updates in {len(done)} of "
          f"{len(again['segments'])} segments, chosen by {again['challenge']['chosen_by']}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"a file cannot be read or is not what it should be: {error!r}")
