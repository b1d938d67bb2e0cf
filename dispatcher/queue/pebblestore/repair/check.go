package repair

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// ErrDamaged means that Check found damage.
var ErrDamaged = errors.New("the store is damaged")

// maxListed bounds the number of damaged parts in an error text.
const maxListed = 5

// checkEvery is the number of entries between two calls of the callback of Check.
const checkEvery = 1000

// Check reads every file of the closed store in dir, as Run does, and returns an ErrDamaged that names
// the damaged parts. It changes nothing but its lock file, and needs no disk space. It calls proceed
// regularly, and ends with its error.
func Check(dir string, proceed func() error) error {
	lock, err := lockStore(dir)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := proceed(); err != nil {
		return err
	}
	s, err := newSalvager(dir, lock)
	if err != nil {
		return fmt.Errorf("check the queue in %s: %w", dir, err)
	}
	entries := 0
	err = s.each(func(entry) error {
		if entries++; entries%checkEvery == 0 {
			return proceed()
		}
		return nil
	})
	if err != nil {
		return err
	}
	var damages []string
	for _, d := range s.damages() {
		if len(damages) == maxListed {
			damages = append(damages, fmt.Sprintf("and %d more", len(s.damages())-maxListed))
			break
		}
		damages = append(damages, filepath.Base(d.Path)+": "+d.What)
	}
	if len(damages) > 0 {
		return fmt.Errorf("%w: %s", ErrDamaged, strings.Join(damages, "; "))
	}
	return nil
}
