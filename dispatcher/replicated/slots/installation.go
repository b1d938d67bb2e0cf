package slots

import (
	"errors"
	"fmt"
	"regexp"
)

// ErrOtherInstallation reports that the identity of another installation is recorded in a log.
var ErrOtherInstallation = errors.New("the log belongs to another installation")

var installation = regexp.MustCompile(`^[A-Za-z0-9._:/-]{1,200}$`)

// ValidateInstallation returns an error if the identity of an installation is empty, or not 1 to 200 letters, digits and ._:/-.
func ValidateInstallation(own string) error {
	switch {
	case own == "":
		return errors.New("the identity of the installation is missing; set --replication-installation to the same value in all processes of this installation, and to another one in each other installation: they take over each other's messages")
	case !installation.MatchString(own):
		return fmt.Errorf("the installation %q is not 1 to 200 letters, digits and ._:/-", own)
	}
	return nil
}

// CheckInstallation returns ErrOtherInstallation unless a log has the identity of this process's installation, or none, as
// one that was created by hand.
func CheckInstallation(recorded, own string) error {
	if recorded == "" || recorded == own {
		return nil
	}
	return fmt.Errorf("%w: it is the log of %q, and this process belongs to %q; use another --replication-name (replication.jetStream.name in the chart) for a separate installation, or set --replication-installation (replication.jetStream.installation) to %q to continue with this log", ErrOtherInstallation, recorded, own, recorded)
}
