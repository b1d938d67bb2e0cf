package record

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/posthorn/posthorn/test/witness"
)

// Clock gives the times of all journals of a process.
type Clock struct {
	name  string
	start time.Time
}

// newClock returns a clock that begins now. It does not jump with the wall clock.
func newClock() *Clock {
	now := time.Now()
	return &Clock{fmt.Sprintf("%d-%d", os.Getpid(), now.UnixNano()), now}
}

// Now returns the time.
func (c *Clock) Now() time.Duration { return time.Since(c.start) }

// Journal writes a journal. Its methods can be called concurrently.
type Journal struct {
	clock *Clock
	mu    sync.Mutex
	file  *os.File
	to    *bufio.Writer
	n     int
	err   error
}

// create creates the journal NAME.jsonl in a folder.
func create(dir, name string, role witness.Role, clock *Clock) (*Journal, error) {
	file, err := os.OpenFile(filepath.Join(dir, name+".jsonl"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	j := &Journal{clock: clock, file: file, to: bufio.NewWriter(file)}
	j.Write(witness.Line{Head: &witness.Head{Role: role, Clock: clock.name}})
	return j, nil
}

// Now returns the time of the journal's clock.
func (j *Journal) Now() time.Duration { return j.clock.Now() }

// Write appends a line, and sets its number and its time. The lines are in the file only after Close or Flush.
func (j *Journal) Write(l witness.Line) {
	j.mu.Lock()
	defer j.mu.Unlock()
	l.Number, l.At = j.n, j.clock.Now()
	j.n++
	text, err := json.Marshal(l)
	if err == nil {
		_, err = j.to.Write(append(text, '\n'))
	}
	j.err = errors.Join(j.err, err)
}

// Close ends the journal: without its last line it is cut.
func (j *Journal) Close() error {
	j.Write(witness.Line{End: true})
	return errors.Join(j.err, j.to.Flush(), j.file.Close())
}
