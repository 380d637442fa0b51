#!/usr/bin/env python3
"""Checks a statement of `isobit prove` without Isobit: the signature, the files of the final folder,
and every field: it is made again from the receipt and the files, and must be the same.

    verify_statement.py statement.json FINAL_FOLDER [--key public.pem] [--challenge HEX]

Needs the standard library, and `cryptography` for the signature (Ed25519, or ECDSA with P-256). It
does not replay anything: what was replayed, and by whose choice, is printed. BLAKE3 is in no standard
library: hashes of inputs and of the chain are compared with those in the receipt, whose SHA-256 counts.
"""

import argparse, base64, hashlib, json, math, pathlib, re, stat, sys

TYPE = "application/vnd.in-toto+json"
BESIDE = ("MANIFEST.json", "model.sig", "statement.json")


def fail(what):
    print("not verified: " + re.sub(r"[^ -~]", "?", str(what)))
    sys.exit(1)


def need(holds, what):
    if not holds:
        fail(what)


def read(path):
    need(stat.S_ISREG(path.stat().st_mode), f"{path} is not a regular file")
    return path.read_bytes()


def parsed(data):
    """Strict JSON in UTF-8 in which no object has a key twice: readers would disagree about its value."""

    def unique(pairs):
        need(len(dict(pairs)) == len(pairs), "a key is there twice")
        return dict(pairs)

    return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=lambda name: fail(f"{name} is no number"))


def check_signature(envelope, payload, key_file):
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ImportError:
        fail("a signature needs the Python package `cryptography`")
    text = read(pathlib.Path(key_file))
    key = load_pem_private_key(text, None).public_key() if b"PRIVATE KEY" in text else load_pem_public_key(text)
    is_ec = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    need(is_ec or isinstance(key, ed25519.Ed25519PublicKey), "the key is neither Ed25519 nor ECDSA with P-256")
    message = b"DSSEv1 %d %s %d %s" % (len(TYPE), TYPE.encode(), len(payload), payload)
    for signature in envelope["signatures"]:
        try:
            return key.verify(base64.b64decode(signature["sig"], validate=True), message, *[ec.ECDSA(SHA256())] * is_ec)
        except (InvalidSignature, ValueError):
            continue
    fail("no signature of the statement is of this key")


def chosen(challenge, digest, segments, count):
    """The segments that a challenge chooses, as in crates/proof/src/statement/segments.rs."""
    numbers = list(range(segments))
    for at in range(count):
        seed = hashlib.sha256(f"isobit.prove/2 {challenge} {digest} {at}".encode()).digest()
        other = at + int.from_bytes(seed[:8], "little") % (segments - at)
        numbers[at], numbers[other] = numbers[other], numbers[at]
    return sorted(numbers[:count])


def detection(segments, count, wrong):
    return 1 - math.comb(segments - wrong, count) / math.comb(segments, count) if count and wrong else 0.0


def reexecution(said, made, segment, digest):
    """What was replayed, with every number that follows from it."""
    parts, updates = [], made["updates"]
    need(type(segment) is int and segment > 0, "the receipt fixes no segments")
    need(len(said["segments"]) == -(-updates // segment), "the segments are not those of the receipt")
    for first, part in zip(range(1, updates + 1, segment), said["segments"]):
        begins, replayed = part["starts_after"], part["reexecuted"]
        need(type(begins) is int and 0 <= begins < first and type(replayed) is bool, "a segment is not one")
        last = min(first + segment - 1, updates)
        parts.append({"first": first, "last": last, "starts_after": begins, "reexecuted": replayed})
    done = [at for at, part in enumerate(parts) if part["reexecuted"]]
    need(done, "nothing was replayed")
    hexadecimal = said["challenge"].get("hex")
    need(hexadecimal is None or re.fullmatch("[0-9a-f]{1,128}", hexadecimal), "the challenge is none")
    choice = {"chosen_by": "all" if len(done) == len(parts) else "self"}
    if hexadecimal is not None:
        choice = {"chosen_by": "verifier", "hex": hexadecimal}
    need(done == chosen(hexadecimal or "", digest, len(parts), len(done)), "the challenge chooses other segments")
    need(all(type(value) is str for value in said["environment"].values()), "the environment is no list of texts")
    chances = {"if_one_segment_is_wrong": 1, "if_a_tenth_is_wrong": -(-len(parts) // 10)}
    chances = {name: detection(len(parts), len(done), wrong) for name, wrong in chances.items()}
    for name, chance in chances.items():
        need(abs(said["probability_of_detection"][name] - chance) < 1e-12, "a probability is not that of the segments")
    count = sum(parts[at]["last"] - parts[at]["first"] + 1 for at in done)
    return {"updates": updates, "reexecuted_updates": count, "segments": parts, "challenge": choice, "agrees": True,
            "probability_of_detection": said["probability_of_detection"], "environment": said["environment"]}


def expected(statement, receipt, folder):
    made, digest = receipt["made"], receipt["digest"]
    named = lambda name, blake3: {"name": name, "digest": {"blake3": blake3}}
    inputs = [named(f"base/{name}", file["blake3"]) for name, file in made["base"]["files"].items()]
    inputs += [named(f"tokenizer/{name}", file["blake3"]) for name, file in made["tokenizer"].items()]
    inputs += [named(f"data/{file['use']}-{at}", file["blake3"]) for at, file in enumerate(made["data"])]
    inputs += [named("start/adapter", made["identity"]["start"])] if "start" in made["identity"] else []
    own = next((one["digest"]["blake3"] for one in statement["subject"] if one["name"] == "receipt.json"), None)
    hashes = dict({name: file["blake3"] for name, file in receipt["result"].items()}, **{"receipt.json": own})
    need(all(pathlib.PurePath(name).name == name for name in hashes), "a name is not that of a file of the folder")
    present = {path.name for path in folder.iterdir()} - set(BESIDE)
    need(present == set(hashes), f"not the files of the statement: {sorted(present ^ set(hashes))}")
    sha256 = lambda name: hashlib.sha256(read(folder / name)).hexdigest()
    subjects = [{"name": name, "digest": {"sha256": sha256(name), "blake3": hashes[name]}} for name in sorted(hashes)]
    details = {"builder": {"id": f"urn:isobit:program:{receipt['program']}"}, "metadata": {"invocationId": digest},
               "byproducts": [named("chain", made["link"]), {"name": "receipt", "digest": {"sha256": digest}}]}
    definition = {"buildType": "urn:isobit:training:2", "externalParameters": {"config": made["config"]},
                  "internalParameters": {"identity": made["identity"]}, "resolvedDependencies": inputs}
    again = reexecution(statement["predicate"]["isobit_reexecution"], made, receipt["segment"], digest)
    predicate = {"buildDefinition": definition, "runDetails": details, "isobit_reexecution": again}
    return {"_type": "https://in-toto.io/Statement/v1", "subject": subjects,
            "predicateType": "https://slsa.dev/provenance/v1", "predicate": predicate}


def same(found, wanted, place):
    """1, 1.0 and true are different things here."""
    need(type(found) is type(wanted), f"{place} is not what the receipt, the files and the replay give")
    if isinstance(found, (dict, list)):
        keys = lambda value: set(value) if isinstance(value, dict) else range(len(value))
        need(keys(found) == keys(wanted), f"{place} has other parts than the receipt, the files and the replay give")
        for key in keys(found):
            same(found[key], wanted[key], f"{place}.{key}")
    else:
        need(found == wanted, f"{place} is not what the receipt, the files and the replay give")


def main():
    parser = argparse.ArgumentParser(description="checks a statement of isobit prove")
    parser.add_argument("statement")
    parser.add_argument("folder", help="the final folder that the statement is about")
    parser.add_argument("--key", help="public key in PEM that must have signed it")
    parser.add_argument("--challenge", help="challenge that it must answer")
    arguments = parser.parse_args()
    envelope, folder = parsed(read(pathlib.Path(arguments.statement))), pathlib.Path(arguments.folder)
    need(set(envelope) == {"payload", "payloadType", "signatures"}, "the envelope has other fields than those of DSSE")
    need(all(set(one) <= {"keyid", "sig"} for one in envelope["signatures"]), "a signature has unknown fields")
    need(envelope["payloadType"] == TYPE, "the payload is not an in-toto statement")
    payload = base64.b64decode(envelope["payload"], validate=True)
    if arguments.key:
        check_signature(envelope, payload, arguments.key)
    statement, receipt = parsed(payload), parsed(read(folder / "receipt.json"))
    covered = {"made": receipt["made"], "segment": receipt["segment"], "result": receipt["result"]}
    text = json.dumps(covered, separators=(",", ":"), ensure_ascii=False)
    need(hashlib.sha256(text.encode()).hexdigest() == receipt["digest"], "the digest of the receipt is not its own")
    same(statement, expected(statement, receipt, folder), "statement")
    again = statement["predicate"]["isobit_reexecution"]
    done, choice = sum(part["reexecuted"] for part in again["segments"]), again["challenge"]
    if arguments.challenge and done < len(again["segments"]):
        need(choice.get("hex") == arguments.challenge.lower(), "it does not answer the challenge")
    print(f"verified: {len(statement['subject'])} files, {'signed by the given key' if arguments.key else 'signature not checked'}")
    print(f"receipt {receipt['digest']}")
    print(f"replayed: {again['reexecuted_updates']} of {again['updates']} updates in {done} of {len(again['segments'])} segments, "
          f"chosen by {choice['chosen_by']} {choice.get('hex', '')}; one wrong segment is found with probability "
          f"{again['probability_of_detection']['if_one_segment_is_wrong']:.3f}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
        fail(f"a file cannot be read or is not what it should be: {error!r}")
