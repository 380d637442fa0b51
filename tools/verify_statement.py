#!/usr/bin/env python3
"""Checks a statement of `isobit prove` without Isobit (docs/receipt-format.md): its signature, the
files of the final folder, and every field, which is made again from the receipt and the files.

    verify_statement.py run/statement.json run/final --key public.pem --challenge HEX

Needs Python 3.11 and `cryptography`; replays nothing. Left to `isobit verify`: chain, checkpoints,
MANIFEST.json, form of the receipt, and BLAKE3, here compared with the receipt's."""
import argparse, base64, contextlib, hashlib, json, pathlib, re, sys
PAYLOAD_TYPE = "application/vnd.in-toto+json"
BESIDE = {"MANIFEST.json", "model.sig", "statement.json"}
sys.excepthook = lambda kind, error, _: print("not verified:", ascii(
    str(error) if isinstance(error, (ValueError, OSError)) else error), file=sys.stderr)
def need(holds, what):
    if not holds: raise ValueError(what)
def once(pairs):  # Of two equal keys, another reader may take the other one.
    need(len(dict(pairs)) == len(pairs), "a key appears twice")
    return dict(pairs)
def decoded(text):  # One text for the same bytes.
    data = base64.b64decode(text, validate=True)
    need(base64.b64encode(data).decode() == text, "not base64 as it is written")
    return data
integer_as_written = lambda digits: digits if digits == "-0" else int(digits)
def parsed(data):
    return json.loads(data.decode(), object_pairs_hook=once, parse_int=integer_as_written)
def written(value, **form):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), **form).encode()
named = lambda name, **digest: {"name": name, "digest": digest}
PRIME, ORDER_8 = 2**255 - 19, 0x05fc536d880238b13933c6d305acdfd5f098eff289f4c345b027b2c28f95e826
def is_small(point):  # Whether a point of Ed25519 is one of 8 that sign anything.
    height = (int.from_bytes(point, "little") & 2**255 - 1) % PRIME
    return height in (0, 1, PRIME - 1, ORDER_8, PRIME - ORDER_8)
def first_difference(found, wanted, place=""):
    if type(found) is type(wanted) is list and len(found) == len(wanted):
        found, wanted = dict(enumerate(found)), dict(enumerate(wanted))
    if not type(found) is type(wanted) is dict: return place if found != wanted else None
    inner = (first_difference(found.get(key), wanted.get(key), f"{place}.{key}".strip("."))
             for key in sorted({*found, *wanted}))
    return next(filter(None, inner), None)

parser = argparse.ArgumentParser(description="Checks a statement of isobit prove.")
for name in ("statement", "folder", "--key"): parser.add_argument(name, type=pathlib.Path)
parser.add_argument("--challenge", type=str.lower)
asked = parser.parse_args()

# The envelope, and its signature: of several, one by the given key is enough.
with open(asked.statement, "rb") as file: text = file.read((32 << 20) + 1)
need(len(text) <= 32 << 20, "the statement has more than 32 MiB")
envelope = parsed(text)
payload, signatures = decoded(envelope["payload"]), envelope["signatures"]
need(set(envelope) == {"payload", "payloadType", "signatures"} and len(signatures) <= 100
     and (envelope["payloadType"], type(signatures)) == (PAYLOAD_TYPE, list), "not an envelope")
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
    need(is_p256 or not is_small(key.public_bytes_raw()), "the key is of small order")
    how = [ec.ECDSA(hashes.SHA256())] if is_p256 else []
    message = b"DSSEv1 %d %s %d %s" % (
        len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
    def accepts(signature):
        with contextlib.suppress(Exception):
            signature = decoded(signature["sig"])
            need(is_p256 or not is_small(signature[:32]), "its first half is of small order")
            return key.verify(signature, message, *how) is None
    need(any(map(accepts, signatures)), "no signature was made with the given key")

# The receipt, and the files of the folder.
found, receipt = parsed(payload), parsed((asked.folder / "receipt.json").read_bytes())
made, digest, said = receipt["made"], receipt["digest"], found["predicate"]["isobit_reexecution"]
covered = written({part: receipt[part] for part in ("made", "segment", "result")})
need(receipt["schema"] == "isobit.receipt/2" and "rows" in made, "not a receipt of version 2")
need(hashlib.sha256(covered).hexdigest() == digest, "the digest of the receipt is not its own")
files = {one["name"]: one["digest"] for one in found["subject"] if one["name"] == "receipt.json"}
files |= receipt["result"]
need(re.fullmatch("[0-9a-f]{64}", files["receipt.json"]["blake3"]), "the receipt has no hash")
present = {path.name: path.is_file() for path in asked.folder.iterdir() if path.name not in BESIDE}
need(present == dict.fromkeys(files, True), f"not a final folder with {list(files)}")
sha256 = lambda name: hashlib.file_digest(open(asked.folder / name, "rb"), "sha256").hexdigest()
subjects = [named(one, sha256=sha256(one), blake3=files[one]["blake3"]) for one in sorted(files)]
changed = [one["name"] for one in subjects if one not in found["subject"]]
need(not changed, f"not as the statement says: {changed}")

# The replay: all follows from the number of segments, the challenge, and where each begins.
segment_updates, update_count = receipt["segment"], made["updates"]
segment_count = -(-update_count // segment_updates)
replayed_count = sum(one["reexecuted"] is True for one in said["segments"])
is_all, challenge = replayed_count == segment_count, said["challenge"].get("hex")
need(len(said["segments"]) == segment_count and replayed_count > 0, "no segments, or others")
need(all(one is None or re.fullmatch("[0-9a-f]{1,128}", one)
         for one in (asked.challenge, challenge)), "a challenge is not hexadecimal")
need(asked.challenge in (None, challenge) or is_all, "it does not answer the challenge")
order, chance_missed = list(range(segment_count)), [1.0, 1.0]
for at in range(replayed_count):  # As crates/proof/src/statement/segments.rs chooses.
    seed = hashlib.sha256(f"isobit.prove/2 {challenge or ''} {digest} {at}".encode()).digest()
    left = segment_count - at
    other = at + int.from_bytes(seed[:8], "little") % left
    order[at], order[other] = order[other], order[at]
    chance_missed = [chance * (left - wrong) / left
                     for chance, wrong in zip(chance_missed, (1, -(-segment_count // 10)))]
chosen = order[:replayed_count]
segments = [{"first": at * segment_updates + 1,
             "last": min((at + 1) * segment_updates, update_count),
             "starts_after": range(at * segment_updates + 1)[one["starts_after"]],
             "reexecuted": at in chosen} for at, one in enumerate(said["segments"])]
chosen_by = "verifier" if challenge else "all" if is_all else "self"
reexecution = {
    "updates": update_count, "segments": segments, "agrees": True,
    "reexecuted_updates": sum(segments[at]["last"] - at * segment_updates for at in chosen),
    "challenge": {"chosen_by": chosen_by} | ({"hex": challenge} if challenge else {}),
    "environment": {name: str(text) for name, text in said["environment"].items()}}
if chosen_by != "self":  # A prover can choose again until no wrong segment is among them.
    reexecution["probability_of_detection"] = {
        "if_one_segment_is_wrong": 1 - chance_missed[0],
        "if_a_tenth_is_wrong": 1 - chance_missed[1]}

# The statement, made again.
inputs = {f"base/{name}": of["blake3"] for name, of in made["base"]["files"].items()}
inputs |= {f"tokenizer/{name}": of["blake3"] for name, of in made["tokenizer"].items()}
inputs |= {f"data/{of['use']}-{at}": of["blake3"] for at, of in enumerate(made["data"])}
inputs |= {"start/adapter": of for key, of in made["identity"].items() if key == "start"}
build = {"buildType": "urn:isobit:training:3", "externalParameters": {"config": made["config"]},
         "internalParameters": {"identity": made["identity"]},
         "resolvedDependencies": [named(name, blake3=of) for name, of in inputs.items()]}
details = {"builder": {"id": f"urn:isobit:program:{receipt['program']}"},
           "metadata": {"invocationId": digest},
           "byproducts": [named("chain", blake3=made["link"]), named("receipt", sha256=digest)]}
predicate = {"buildDefinition": build, "runDetails": details, "isobit_reexecution": reexecution}
wanted = {"_type": "https://in-toto.io/Statement/v1", "predicate": predicate, "subject": subjects,
          "predicateType": "https://slsa.dev/provenance/v1"}
need(written(found, sort_keys=True) == written(wanted, sort_keys=True),
     f"{first_difference(found, wanted)} is not what the receipt, the files and the replay give")
print(f"verified: {len(files)} files, signature", "valid" if asked.key else "not checked")
choice = {"all": "", "verifier": f", by challenge {challenge}",
          "self": ", chosen by the prover, who could avoid any segment"}[chosen_by]
if challenge and not asked.challenge: choice += " (not compared: give --challenge)"
elif asked.challenge != challenge: choice += f", as {asked.challenge} would ask, for all were"
print(f"receipt {digest}: {replayed_count} of {segment_count} segments replayed{choice}")
