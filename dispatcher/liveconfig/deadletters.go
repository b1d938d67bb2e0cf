package liveconfig

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"time"
)

// DeadLetterAction asks a pod to do something with its dead letters: POST
// /deadletters/redeliver or /deadletters/purge. The answer is a line of JSON, a
// DeadLetterProgress, now and then, and one at the end.
type DeadLetterAction struct {
	// Destination is "namespace/name".
	Destination string             `json:"destination"`
	Selector    DeadLetterSelector `json:"selector"`
	// DryRun only counts.
	DryRun bool `json:"dryRun,omitempty"`
	// Rate is in dead letters a second, for redelivery.
	Rate float64 `json:"rate,omitempty"`
}

// DeadLetterSelector chooses dead letters. Its zero value chooses all; every part that is set must match.
type DeadLetterSelector struct {
	// Keys of dead letters.
	Keys []string `json:"keys,omitempty"`
	// Reasons, types of call, and names of events.
	Reasons []string `json:"reasons,omitempty"`
	Types   []string `json:"types,omitempty"`
	Events  []string `json:"events,omitempty"`
	// Since and Until bound the time of the last failure; Until is exclusive.
	Since time.Time `json:"since,omitzero"`
	Until time.Time `json:"until,omitzero"`
}

// DeadLetterProgress counts what was done. The last one has Done or Error.
type DeadLetterProgress struct {
	// Matched counts chosen dead letters, Redelivered those that are pending again
	// (or removed, by a purge).
	Matched     int64 `json:"matched"`
	Redelivered int64 `json:"redelivered"`
	// Bytes of the bodies that matched.
	Bytes int64  `json:"bytes"`
	Done  bool   `json:"done,omitempty"`
	Error string `json:"error,omitempty"`
}

// FollowDeadLetters reads the answer to a DeadLetterAction to its end. It returns
// the last progress; each, unless nil, gets every one. io.ErrUnexpectedEOF is a pod
// that ended before it was done.
func FollowDeadLetters(answer io.Reader, each func(DeadLetterProgress)) (p DeadLetterProgress, err error) {
	lines := bufio.NewScanner(answer)
	for lines.Scan() {
		p = DeadLetterProgress{}
		if err := json.Unmarshal(lines.Bytes(), &p); err != nil {
			return p, err
		}
		if each != nil {
			each(p)
		}
		if p.Error != "" {
			return p, errors.New(p.Error)
		}
		if p.Done {
			return p, nil
		}
	}
	return p, cmp.Or(lines.Err(), io.ErrUnexpectedEOF)
}
