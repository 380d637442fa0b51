#!/usr/bin/env python3
"""Checks a statement of `isobit prove` without Isobit (docs/receipt-format.md): its signature, the
files of the final folder, and every field, which is made again from the receipt and the files.

    verify_statement.py run/statement.json run/final --key public.pem

Needs Python 3.11 and `cryptography`; replays nothing. Left to `isobit verify`: chain, checkpoints,
MANIFEST.json, form of the receipt, and BLAKE3, here compared with the receipt's."""
import argparse, base64, contextlib, hashlib, json, pathlib, re, sys
TYPE, BESIDE = "application/vnd.in-toto+json", {"MANIFEST.json", "model.sig", "statement.json"}
sys.excepthook = lambda kind, error, _: print("not verified:", ascii(
    str(error) if isinstance(error, (ValueError, OSError)) else error), file=sys.stderr)
def need(holds, what):
    if not holds: raise ValueError(what)
def once(pairs):  # Of two equal keys, another reader may take the other one.
    need(len(dict(pairs)) == len(pairs), "a key appears twice")
    return dict(pairs)
def raw(text):  # One text for the same bytes.
    data = base64.b64decode(text, validate=True)
    need(base64.b64encode(data).decode() == text, "not base64 as it is written")
    return data
whole = lambda digits: digits if digits == "-0" else int(digits)
parsed = lambda data: json.loads(data.decode(), object_pairs_hook=once, parse_int=whole)
written = lambda value, **form: json.dumps(value, ensure_ascii=False, **form).encode()
named = lambda name, **digest: {"name": name, "digest": digest}

parser = argparse.ArgumentParser(description="Checks a statement of isobit prove.")
for name in ("statement", "folder", "--key"): parser.add_argument(name, type=pathlib.Path)
parser.add_argument("--challenge", type=str.lower)
asked = parser.parse_args()

# The envelope, and its signature: of several, one by the given key is enough.
envelope = parsed(asked.statement.read_bytes())
payload, signatures = raw(envelope["payload"]), envelope["signatures"]
need(set(envelope) == {"payload", "payloadType", "signatures"} and envelope["payloadType"] == TYPE
     and type(signatures) is list and len(signatures) <= 100, "not the envelope of a statement")
need(all({"sig"} <= set(one) <= {"keyid", "sig"} and set(map(type, one.values())) == {str}
         for one in signatures), "a signature is not one of DSSE")
if asked.key:
    try:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    except ImportError:
        sys.exit("nothing was checked: a signature needs `pip install cryptography`")
    key = serialization.load_pem_public_key(asked.key.read_bytes())
    is_p256 = isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
    need(is_p256 or isinstance(key, ed25519.Ed25519PublicKey), "the key is not Ed25519 or P-256")
    how = [ec.ECDSA(hashes.SHA256())] if is_p256 else []
    message = b"DSSEv1 %d %s %d %s" % (len(TYPE), TYPE.encode(), len(payload), payload)
    def accepts(one):
        with contextlib.suppress(Exception):
            return key.verify(raw(one["sig"]), message, *how) is None
    need(any(map(accepts, signatures)), "no signature was made with the given key")

# The receipt, and the files of the folder.
found, receipt = parsed(payload), parsed((asked.folder / "receipt.json").read_bytes())
made, digest, said = receipt["made"], receipt["digest"], found["predicate"]["isobit_reexecution"]
covered = written({of: receipt[of] for of in ("made", "segment", "result")}, separators=(",", ":"))
need(receipt["schema"] == "isobit.receipt/2" and hashlib.sha256(covered).hexdigest() == digest,
     "not a receipt of version 2, or its digest is not its own")
files = {one["name"]: one["digest"] for one in found["subject"] if one["name"] == "receipt.json"}
files |= receipt["result"]
need(re.fullmatch("[0-9a-f]{64}", files["receipt.json"]["blake3"]), "the receipt has no hash")
present = {path.name: path.is_file() for path in asked.folder.iterdir() if path.name not in BESIDE}
need(present == dict.fromkeys(files, True), f"not a final folder with {list(files)}")
sha256 = lambda name: hashlib.file_digest(open(asked.folder / name, "rb"), "sha256").hexdigest()
subjects = [named(one, sha256=sha256(one), blake3=files[one]["blake3"]) for one in sorted(files)]

# The replay: all follows from the number of segments, the challenge, and where each begins.
every, updates, given = receipt["segment"], made["updates"], said["challenge"].get("hex")
is_hex = re.compile("[0-9a-f]{1,128}").fullmatch
most, count = -(-updates // every), sum(one["reexecuted"] is True for one in said["segments"])
need(len(said["segments"]) == most and count > 0, "other segments, or none replayed")
need(all(one is None or is_hex(one) for one in (asked.challenge, given)), "a challenge is not hexadecimal")
need(asked.challenge in (None, given) or count == most, "it does not answer the challenge")
order, missed, tenth = list(range(most)), [1.0, 1.0], -(-most // 10)
for at in range(count):  # As crates/proof/src/statement/segments.rs chooses.
    seed = hashlib.sha256(f"isobit.prove/2 {given or ''} {digest} {at}".encode()).digest()
    other = at + int.from_bytes(seed[:8], "little") % (most - at)
    order[at], order[other] = order[other], order[at]
    missed = [p * (most - w - at) / (most - at) for p, w in zip(missed, (1, tenth))]
segments = [{"first": at * every + 1, "last": min((at + 1) * every, updates),
             "starts_after": range(at * every + 1)[one["starts_after"]],
             "reexecuted": at in order[:count]} for at, one in enumerate(said["segments"])]
by = "verifier" if given else "all" if count == most else "self"
again = {"updates": updates, "segments": segments, "agrees": True,
         "reexecuted_updates": sum(segments[at]["last"] - at * every for at in order[:count]),
         "challenge": {"chosen_by": by, "hex": given} if given else {"chosen_by": by},
         "environment": {name: str(text) for name, text in said["environment"].items()},
         "probability_of_detection": {"if_one_segment_is_wrong": 1 - missed[0],
                                      "if_a_tenth_is_wrong": 1 - missed[1]}}

# The statement, made again.
inputs = {f"base/{name}": of["blake3"] for name, of in made["base"]["files"].items()}
inputs |= {f"tokenizer/{name}": of["blake3"] for name, of in made["tokenizer"].items()}
inputs |= {f"data/{of['use']}-{at}": of["blake3"] for at, of in enumerate(made["data"])}
inputs |= {"start/adapter": of for key, of in made["identity"].items() if key == "start"}
build = {"buildType": "urn:isobit:training:2", "externalParameters": {"config": made["config"]},
         "internalParameters": {"identity": made["identity"]},
         "resolvedDependencies": [named(name, blake3=of) for name, of in inputs.items()]}
details = {"builder": {"id": f"urn:isobit:program:{receipt['program']}"},
           "metadata": {"invocationId": digest},
           "byproducts": [named("chain", blake3=made["link"]), named("receipt", sha256=digest)]}
predicate = {"buildDefinition": build, "runDetails": details, "isobit_reexecution": again}
wanted = {"_type": "https://in-toto.io/Statement/v1", "predicate": predicate, "subject": subjects,
          "predicateType": "https://slsa.dev/provenance/v1"}
other = [one["name"] for one in subjects if one not in found["subject"]]
need(not other, f"not as the statement says: {other}")
need(written(found, sort_keys=True) == written(wanted, sort_keys=True), "a field is wrong")
print(f"verified: {len(files)} files, signature", "valid" if asked.key else "not checked")
note = "" if asked.challenge == given else " (not compared: give --challenge)"
chosen = {"all": "", "self": ", chosen by the prover", "verifier": f", by challenge {given}{note}"}
print(f"receipt {digest}: {count} of {most} segments replayed{chosen[by]}")
