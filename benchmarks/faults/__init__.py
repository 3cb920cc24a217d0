"""Attack Vitascope by command: kills, bit flips, full disks, concurrent resumes, fuzzed inputs and clock jumps."""
