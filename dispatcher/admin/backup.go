package admin

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/posthorn/posthorn/contract/adminapi"
)

// backupWriteTimeout bounds a write to a client that does not read: a backup keeps disk space.
const backupWriteTimeout = time.Minute

// BackupToken authorizes the requests for backups of a server without a guard: a backup contains
// Secrets, which other users of the machine must not read.
type BackupToken struct {
	// File is the file with the token. Value is the token; empty refuses all requests.
	File, Value string
}

func (t BackupToken) authorizes(r *http.Request) bool {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return t.Value != "" && strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare([]byte(token), []byte(t.Value)) == 1
}

// mountBackup adds the path of backups. An error before the first byte is the answer; a later one
// ends the connection, so that the client does not take the archive for whole.
func mountBackup(mux *http.ServeMux, o Options) {
	mux.HandleFunc("POST "+adminapi.BackupPath, func(w http.ResponseWriter, r *http.Request) {
		if o.Guard == nil && !o.BackupToken.authorizes(r) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="posthorn"`)
			http.Error(w, fmt.Sprintf("a backup contains Secrets, so the request needs the token in %[1]s; as the user who runs Posthorn, set --token-file %[1]s", o.BackupToken.File), http.StatusUnauthorized)
			return
		}
		out := &backupWriter{w: w, control: http.NewResponseController(w)}
		err := o.Backup(r.Context(), out)
		switch {
		case err == nil:
		case out.started:
			panic(http.ErrAbortHandler)
		case errors.Is(err, adminapi.ErrBackupRunning):
			http.Error(w, err.Error(), http.StatusConflict)
		default:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
}

type backupWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	started bool
}

func (b *backupWriter) Write(p []byte) (int, error) {
	if !b.started {
		b.started = true
		b.w.Header().Set(contentType, "application/x-tar")
	}
	if err := b.control.SetWriteDeadline(time.Now().Add(backupWriteTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	return b.w.Write(p)
}
