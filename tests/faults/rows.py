"""The rows of the fault matrix: each fault and its promise.

The mark `fault` of the tests says how often each is injected.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    injected: str
    promised: str


_TABLE = """\
A1 | SIGKILL of one rank at a random instant | identical; peers gone in 5 s; one checkpoint interval lost
A2 | SIGKILL of all ranks | identical; resumed within 30 s
A3 | SIGKILL of the launcher | identical; no orphan after 5 s
A4 | SIGKILL inside a save, 0 to 50 ms after its temporary file appears | identical; no damaged file
A5 | SIGKILL of a loader worker | identical; its rank continues, no step lost
A6 | one rank raises | all end in 15 s; the last line names rank, step, sample ids and the first error
A7 | SIGSTOP of one rank | all end within the step timeout + 15 s
A8 | a second start in the same run folder | exit 75 in 5 s; names the other process; no mixed files
B1 | SIGTERM to one of 4 ranks with 2 loader workers each, in any phase | that step saved, exit 75 in 10 s
B2 | SIGTERM and SIGINT again during the save | the save completes
B3 | docker stop | exit code never 137; that step saved
B4 | SIGKILL during the save after SIGTERM | resumes from the previous checkpoint; identical
C1 | disk full | no step lost; a warning for each failed save; after 5 and 10 minutes, exit 4
C2 | a checkpoint truncated, a bit flipped, a page zeroed, empty | named; the one before, or exit 4
C3 | run folder read-only · data read-only · root file system read-only | exit 2 · trains · trains
C4 | ranks that see different directory listings | no deadlock; identical
C5 | disk use, sampled during the run | at most the newest kept, the best and one temporary file
D1 | MLflow absent · 500 · 401 · silent · malformed · down for a time | no step or metric lost; identical
D2 | crash and resume with MLflow | one run with the correct status, no step twice
E1 | images of 16 kinds, good, odd and bad | decoded as Pillow does, or named once and replaced
E2 | bits flipped in images | `data check` names each by its checksum
E3 | 1, 7, 48, 97, 1,000 images; 1 to 4 processes | each image once; the same integers; too few: exit 2
E4 | a file added, removed, changed between runs | refused and named
E5 | a /dev/shm that is too small | the loader trains; never a bare bus error
E6 | an index of many images, many epochs | a worker's memory does not grow
E7 | a small PNG that decodes to 1.3 GB | refused before it is decoded
F1 | killed and resumed with other numbers of processes, exact mode | identical
F2 | the same without exact mode | the same order, each sample once; fine-tuned, 100 losses within 1 %
F3 | other numbers of workers and prefetched batches, also at a resume | identical
F4 | a number of processes that does not divide the batch | exit 2 with the numbers that do
F5 | a configuration changed before a resume | allowed changes apply; others are named, exit 2
G1 | network between two nodes cut for 5 s | continues; identical
G2 | network between two nodes cut for good | both sides end within the timeout + 15 s; one writer
G3 | a node killed, node 0 too · a peer or a name that comes late | node replaced, identical · joins
H1 | malformed configurations | exit 2, one line: key, value, what is allowed; no traceback
H2 | malicious checkpoints | no code in them is executed
H3 | a secret in environment and tracking URI | found in no log, journal, parameter, checkpoint, layer
H4 | the containers and the pods | not root, read-only, no capabilities; Pod Security `restricted`
H5 | MLflow under compose, from outside | only on loopback and its own network; `..` in paths refused
I1 | a non-finite loss or gradient on one rank | all ranks stop before the update, exit 3; named
I2 | a clock that jumps by an hour, either way | no negative duration; timeouts unaffected; identical
I3 | the same run twice | identical
J1 | SIGKILL before the first save of a run started with run.resume=PATH | resumes from PATH; identical
J2 | fsdp, stages: SIGKILL and SIGTERM in validation, in a save, in the first step after a resume | identical
J3 | the data folder unreachable for a while · for good | waits, identical, no image called bad · exit 75
J4 | non-finite logits in validation | reported; never the best checkpoint; no integer overflow
J5 | a registry's model with a pickle, code, an import path; names with `..` | no code runs; exit 2 or 4
K1 | S3: 5 % of requests fail (403, 500, 503, truncated, wrong bytes, stalls) | identical; each counted
K2 | the mirror's store dead for a while · for good | no step lost, all there later · says what it lacks
K3 | SIGKILL of all, and their disk, between uploads and in one | identical elsewhere; one MLflow run
K4 | two starts on one mirror; its holder killed · frozen | exit 75; taken over · writes nothing
K5 | a node lost with its disk, node 0 too; data and run in a bucket | its replacement continues; identical
L1 | a node frozen for good, node 0 too; it thaws later | others gone in 75 s; identical; nothing written
L2 | `spec.suspend` true, then false, in mid-run | pods gone in 10 s, no step lost; identical
L3 | a node killed or frozen within 3 s of the end | the Job completes; identical
L4 | a pod evicted in preflight, while it waits for a peer, in rendezvous | gone in 5 s
M1 | nodes of an elastic job leave and join: 2, 1, 2, 3, 1 | each sample once, in order; exact: identical
"""
ROWS = {name: Row(*texts) for name, *texts in (line.split(" | ") for line in _TABLE.splitlines())}
