#!/usr/bin/env python3
"""Checks a statement of `isobit prove` without Isobit: signature, files of the final folder, and
every field, which is made again from the receipt and the files (docs/receipt-format.md).

    verify_statement.py statement.json FINAL_FOLDER [--key public.pem] [--challenge HEX]

It needs `cryptography` for signatures. It replays nothing: it prints what was, and who chose it.
Without BLAKE3, such hashes are compared with the receipt's; MANIFEST.json is not compared."""
import argparse, base64, hashlib, json, math, pathlib, re, stat

TYPE, BESIDE = "application/vnd.in-toto+json", {"MANIFEST.json", "model.sig", "statement.json"}
RECEIPT = ["schema", "program", "made", "segment", "digest", "result", "check"]
def need(holds, what):
    if not holds:
        raise SystemExit("not verified: " + re.sub(r"[^ -~]", "?", str(what)))
    return True
def pieces(path, most=1 << 60):
    need(stat.S_ISREG(path.stat().st_mode), f"{path} is not a regular file")
    need(path.stat().st_size <= most, f"{path} is too large")
    with open(path, "rb") as file:
        yield from iter(lambda: file.read(1 << 20), b"")
def parsed(data):  # Readers of repeated keys, NaN, -0 or half of a character would disagree.
    once = lambda pairs: need(len(dict(pairs)) == len(pairs), "a key appears twice") and dict(pairs)
    whole = lambda digits: int(digits) if need(digits != "-0", "-0 is no whole number") else 0
    value = json.loads(data.decode(), object_pairs_hook=once, parse_int=whole,
                       parse_constant=lambda name: need(False, f"{name} is no number"))
    return value if written(value) else None
def written(value, **form):
    return json.dumps(value, ensure_ascii=False, **form).encode()
def unpacked(text):  # There is one way to write base64.
    data = base64.b64decode(text, validate=True)
    return data if need(base64.b64encode(data).decode() == text, "it is not base64") else None
def check_signature(signatures, payload, key_file):
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    text = b"".join(pieces(key_file, 1 << 14))
    private = pem.load_pem_private_key(text, None) if b"PRIVATE KEY" in text else None
    key = private.public_key() if private else pem.load_pem_public_key(text)
    is_ec = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
    need(is_ec or isinstance(key, ed25519.Ed25519PublicKey), "the key is not Ed25519 or P-256")
    message = b"DSSEv1 %d %s %d %s" % (len(TYPE), TYPE.encode(), len(payload), payload)
    for one in signatures:
        try:
            return key.verify(unpacked(one["sig"]), message, *[ec.ECDSA(hashes.SHA256())] * is_ec)
        except (InvalidSignature, ValueError, SystemExit):
            continue
    need(False, "no signature of the statement is of this key")
def chosen(challenge, digest, segments, count):  # As crates/proof/src/statement/segments.rs.
    numbers = list(range(segments))
    for at in range(count):
        seed = hashlib.sha256(f"isobit.prove/2 {challenge} {digest} {at}".encode()).digest()
        other = at + int.from_bytes(seed[:8], "little") % (segments - at)
        numbers[at], numbers[other] = numbers[other], numbers[at]
    return set(numbers[:count])
def reexecution(said, receipt):  # What was replayed, with every number that follows from it.
    every, updates, listed = receipt["segment"], receipt["made"]["updates"], said["segments"]
    need(type(every) is type(updates) is int and every > 0, "the receipt fixes no segments")
    need(len(listed) == -(-updates // every), "the segments are not those of the receipt")
    done = {at for at, part in enumerate(listed) if part["reexecuted"] is True}
    most, count, given = len(listed), len(done), said["challenge"].get("hex")
    need(given is None or re.fullmatch("[0-9a-f]{1,128}", given), "the challenge is none")
    need(done and done == chosen(given or "", receipt["digest"], most, count), "others are chosen")
    for at, begins in enumerate(part["starts_after"] for part in listed):
        need(type(begins) is int and 0 <= begins <= at * every, "it begins after its first update")
    parts = [{"first": at * every + 1, "last": min((at + 1) * every, updates),
              "starts_after": part["starts_after"], "reexecuted": at in done}
             for at, part in enumerate(listed)]
    missed = lambda wrong: (max(most - wrong - at, 0) / (most - at) for at in range(count))
    found = lambda wrong: 1 - math.prod(missed(wrong))
    chances = {"if_one_segment_is_wrong": found(1), "if_a_tenth_is_wrong": found(-(-most // 10))}
    for name, number in said["probability_of_detection"].items():  # The last digit may differ.
        if type(number) in (int, float) and abs(number - chances[name]) < 1e-12:
            chances[name] = number
    need(all(type(text) is str for text in said["environment"].values()), "no list of texts")
    choice = {"chosen_by": "verifier", "hex": given} if given is not None else \
             {"chosen_by": "all" if count == most else "self"}
    return {"updates": updates, "segments": parts, "challenge": choice, "agrees": True,
            "reexecuted_updates": sum(parts[at]["last"] - at * every for at in done),
            "environment": said["environment"], "probability_of_detection": chances}
def expected(statement, receipt, folder):
    made, digest, said = receipt["made"], receipt["digest"], statement["predicate"]
    named = lambda name, **digest: {"name": name, "digest": digest}
    files = {"receipt.json": own["digest"]["blake3"]
             for own in statement["subject"] if own["name"] == "receipt.json"}
    need(re.fullmatch("[0-9a-f]{64}", *files.values()), "the receipt is no subject, or has no hash")
    files.update((name, of["blake3"]) for name, of in receipt["result"].items())
    inputs = [(f"base/{name}", of["blake3"]) for name, of in made["base"]["files"].items()]
    inputs += [(f"tokenizer/{name}", of["blake3"]) for name, of in made["tokenizer"].items()]
    inputs += [(f"data/{of['use']}-{at}", of["blake3"]) for at, of in enumerate(made["data"])]
    inputs += [("start/adapter", of) for name, of in made["identity"].items() if name == "start"]
    hashes, present = {}, {path.name for path in folder.iterdir()} - BESIDE
    need(present == set(files), f"not the files of the statement: {sorted(present ^ set(files))}")
    for name in sorted(files):
        hashes[name] = hashlib.sha256()
        for piece in pieces(folder / name):
            hashes[name].update(piece)
    hashes = {name: hash.hexdigest() for name, hash in hashes.items()}
    subjects = [named(name, sha256=hash, blake3=files[name]) for name, hash in hashes.items()]
    details = {"builder": {"id": f"urn:isobit:program:{receipt['program']}"},
               "metadata": {"invocationId": digest},
               "byproducts": [named("chain", blake3=made["link"]), named("receipt", sha256=digest)]}
    definition = {"buildType": "urn:isobit:training:2",
                  "externalParameters": {"config": made["config"]},
                  "internalParameters": {"identity": made["identity"]},
                  "resolvedDependencies": [named(name, blake3=hash) for name, hash in inputs]}
    return {"_type": "https://in-toto.io/Statement/v1", "subject": subjects,
            "predicateType": "https://slsa.dev/provenance/v1",
            "predicate": {"buildDefinition": definition, "runDetails": details,
                          "isobit_reexecution": reexecution(said["isobit_reexecution"], receipt)}}
def main(statement_file, folder, key, challenge):
    envelope = parsed(b"".join(pieces(statement_file, 1 << 25)))
    signatures, payload = envelope["signatures"], unpacked(envelope["payload"])
    need(set(envelope) == {"payload", "payloadType", "signatures"}, "it has other fields than DSSE")
    need(envelope["payloadType"] == TYPE, "the payload is not an in-toto statement")
    need(type(signatures) is list and len(signatures) <= 100, "no list, or too many signatures")
    for one in signatures:
        need({"sig"} <= set(one) <= {"keyid", "sig"}, "a signature has other fields")
        need(all(type(text) is str for text in one.values()), "a signature is no text")
    if key:
        check_signature(signatures, payload, key)
    statement, text = parsed(payload), b"".join(pieces(folder / "receipt.json", 10**8))
    receipt = parsed(text)
    need(written(receipt, indent=2) + b"\n" == text and list(receipt) == RECEIPT
         and receipt["schema"] == "isobit.receipt/2", "the receipt is of another form or version")
    covered = {part: receipt[part] for part in ("made", "segment", "result")}
    digest = hashlib.sha256(written(covered, separators=(",", ":"))).hexdigest()
    need(digest == receipt["digest"], "the digest of the receipt is not its own")
    wanted = expected(statement, receipt, folder)
    found, wanted = (written(value, sort_keys=True) for value in (statement, wanted))
    at = next((at for at, (a, b) in enumerate(zip(found, wanted)) if a != b), len(wanted))
    need(found == wanted, f"receipt, files and replay do not give {found[max(at - 60, 0):at + 60]}")
    again = statement["predicate"]["isobit_reexecution"]
    done, most = sum(part["reexecuted"] for part in again["segments"]), len(again["segments"])
    by, given = again["challenge"]["chosen_by"], again["challenge"].get("hex")
    answers = challenge is None or done == most or given == challenge.lower()
    need(answers, "it does not answer the challenge")
    print(f"verified: {len(statement['subject'])} files,",
          "signed by the given key" if key else "signature not checked")
    print(f"receipt {digest}")
    print(f"replayed {again['reexecuted_updates']} of {again['updates']} updates,",
          f"{done} of {most} segments, chosen by {by} {given or ''}")
    print(f"one wrong segment would be found with a probability of {done / most:.1%}")
    if given and challenge is None:
        print("the challenge is not compared: name the one that you gave with --challenge")
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="checks a statement of isobit prove")
    for name in ("statement", "folder", "--key"):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument("--challenge")
    try:
        main(*vars(parser.parse_args()).values())
    except (OSError, ImportError, LookupError, ValueError, TypeError, AttributeError,
            RecursionError) as error:
        need(False, f"a file cannot be read or is not what it should be: {error!r}")
