package integrity

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// JournalCheck is the result of CheckJournals.
type JournalCheck struct {
	// Damaged are the files that lack synced bytes.
	Damaged []DamagedFile
	// Torn are the logs in which sound records follow damaged bytes that were not provably
	// synced. A power loss causes this when it loses a part of the last writes.
	Torn []DamagedFile
}

// CheckJournals compares the manifest, and the logs from number oldest on, with their synced
// lengths according to the file of positions and the marks in the logs.
func CheckJournals(fsys vfs.FS, dir, manifest string, oldest uint64) (c JournalCheck, err error) {
	positions, _, err := ReadPositions(fsys, dir)
	if err != nil {
		return c, err
	}
	names, err := fsys.List(dir)
	if err != nil {
		return c, err
	}
	damage := func(name, format string, args ...any) {
		c.Damaged = append(c.Damaged, DamagedFile{fsys.PathJoin(dir, name), fmt.Sprintf(format, args...)})
	}
	synced := map[uint64]int64{} // By log number.
	for _, p := range positions {
		if p.Name == manifest {
			data, err := ReadFile(fsys, fsys.PathJoin(dir, manifest))
			if err != nil {
				return c, err
			}
			if sound, _ := SoundManifest(data); sound < p.Offset {
				damage(manifest, "bytes %d to %d are damaged or missing: the file was synced up to the end of this part", sound, p.Offset)
			}
		}
		if number, ok := LogNumber(p.Name); ok && number >= oldest {
			synced[number] = p.Offset
			if p.Offset > 0 && !slices.Contains(names, p.Name) {
				damage(p.Name, "the file is missing, but it was synced up to byte %d", p.Offset)
			}
		}
	}
	type scanned struct {
		logEnd
		name   string
		number uint64
		// gaps are the damaged parts before sound records.
		gaps [][2]int64
	}
	var logs []scanned
	for _, name := range names {
		if number, ok := LogNumber(name); ok && number >= oldest {
			logs = append(logs, scanned{name: name, number: number})
		}
	}
	slices.SortFunc(logs, func(a, b scanned) int { return int(a.number) - int(b.number) })
	var next uint64 // The sequence number of the next change.
	for i := range logs {
		l := &logs[i]
		l.logEnd, err = ScanLogFile(fsys, fsys.PathJoin(dir, l.name), l.number, BatchHead, func(payload []byte) {
			if log, offset, ok := MarkOf(payload); ok {
				synced[log] = max(synced[log], offset)
			}
		}, func(rec LogRecord) error {
			if rec.Gap >= 0 {
				l.gaps, next = append(l.gaps, [2]int64{rec.Gap, rec.At}), 0
			}
			if len(rec.Data) < 12 {
				damage(l.name, "the record at byte %d is not a batch", rec.At)
				return nil
			}
			first, count := binary.LittleEndian.Uint64(rec.Data), binary.LittleEndian.Uint32(rec.Data[8:])
			if next != 0 && first != next {
				damage(l.name, "the batch at byte %d begins with change %d, but the previous one ends before %d: changes in between are missing", rec.At, first, next)
			}
			next = first + uint64(count)
			return nil
		})
		if err != nil {
			return c, err
		}
	}
	for i, l := range logs {
		newest := i == len(logs)-1
		switch {
		case l.sound < synced[l.number]:
			damage(l.name, "bytes %d to %d are damaged or missing; the file was synced up to byte %d", l.sound, gapEnd(l.gaps, synced[l.number]), synced[l.number])
		case !newest && !l.closed:
			damage(l.name, "it has no sound end after byte %d, but it was closed before %s was created", l.sound, logs[i+1].name)
		case len(l.gaps) > 0:
			c.Torn = append(c.Torn, DamagedFile{fsys.PathJoin(dir, l.name), fmt.Sprintf("bytes %d to %d", l.sound, l.gaps[0][1])})
		}
	}
	return c, nil
}

// gapEnd returns the end of the first damaged part, or synced without one.
func gapEnd(gaps [][2]int64, synced int64) int64 {
	if len(gaps) > 0 {
		return gaps[0][1]
	}
	return synced
}

// ScanLogFile reads a write-ahead log and calls record for each sound record. first, when set, gets the
// first keep bytes of the file.
func ScanLogFile(fsys vfs.FS, path string, number uint64, keep int, first func([]byte), record func(LogRecord) error) (logEnd, error) {
	f, err := fsys.Open(path)
	if err != nil {
		return logEnd{}, err
	}
	defer func() { _ = f.Close() }()
	return scanLog(f, number, keep, first, record)
}
