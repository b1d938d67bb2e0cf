package dispatcher

import (
	"errors"
	"sync"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery"
)

// shareWait is how long a dispatcher waits for its share of limits before it takes an equal one.
const shareWait = 30 * time.Second

// shares are the dispatcher's shares of limits. The zero value has the whole limits.
type shares struct {
	mu sync.Mutex
	// own are the shares in effect.
	own *liveconfig.PodShares
	// wait ends shareWait; ended is true when it has ended without a share.
	wait  *time.Timer
	ended bool
}

// SetShares implements liveconfig.SharesSink.
func (d *Dispatcher) SetShares(all liveconfig.Shares) {
	s := &d.shares
	s.mu.Lock()
	defer s.mu.Unlock()
	own := all.Of(d.options.Pod)
	switch {
	case !own.Waits():
		if s.ended = false; s.wait != nil {
			s.wait.Stop()
			s.wait = nil
		}
	case s.ended || d.options.Drain:
		own = own.Alone()
	case s.wait == nil:
		s.wait = time.AfterFunc(shareWait, d.endShareWait)
	}
	d.use(own)
}

// endShareWait gives the dispatcher an equal share if it has none.
func (d *Dispatcher) endShareWait() {
	s := &d.shares
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.own.Waits() {
		s.ended = true
		d.log.Warn("the operator gave this dispatcher no share of limits; it uses an equal one", "pods", s.own.Pods)
		d.use(s.own.Alone())
	}
}

// use puts shares into effect. The mutex is held.
func (d *Dispatcher) use(own *liveconfig.PodShares) {
	d.gate.SetShares(own)
	d.engine.SetShares(own)
	d.store.SetStores(own.Pods)
	d.shares.own = own
}

// applied returns the number of the shares in effect, and the objects that are still above them.
func (s *shares) applied(engine *delivery.Engine) (number int64, above []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.own == nil {
		return 0, nil
	}
	return s.own.Number, engine.AboveShares()
}

// ready returns an error while the dispatcher waits for its share.
func (s *shares) ready() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.own.Waits() {
		return errors.New("waiting for a share of the limits of Sources and destinations")
	}
	return nil
}
