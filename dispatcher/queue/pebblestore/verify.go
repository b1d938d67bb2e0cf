package pebblestore

import (
	"errors"
	"fmt"
	"log/slog"
)

// Verify opens the closed store in dir as a dispatcher would, and checks its ledgers. It does not
// read all files: repair.Check does. It returns the numbers of lanes and of dead letters. A repair
// calls it for the store that it has built.
func Verify(dir string) (lanes, deadLetters int, err error) {
	s, err := Open(dir, Options{DuplicateWindow: MaxDuplicateWindow, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return 0, 0, err
	}
	lanes, deadLetters, err = s.VerifyLedgers()
	return lanes, deadLetters, errors.Join(err, s.Close())
}

// VerifyLedgers checks that the ledger of each lane adds up, and returns the numbers of lanes and of
// dead letters.
func (s *Store) VerifyLedgers() (lanes, deadLetters int, err error) {
	ids := s.Lanes()
	for _, id := range ids {
		if e := s.LaneStats(id).Balance(); e != nil {
			err = errors.Join(err, fmt.Errorf("lane %v: %w", id, e))
		}
	}
	for _, name := range s.Destinations() {
		deadLetters += int(s.DestinationStats(name).DeadLetters)
	}
	return len(ids), deadLetters, err
}
