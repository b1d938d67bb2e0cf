package admin

import (
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/posthorn/posthorn/dispatcher/adminapi"
)

// backupWriteTimeout bounds a write to a client that does not read: a backup keeps disk space.
const backupWriteTimeout = time.Minute

// mountBackup adds the path of backups. An error before the first byte is the answer; a later one
// ends the connection, so that the client does not take the archive for whole.
func mountBackup(mux *http.ServeMux, write func(io.Writer) error) {
	mux.HandleFunc("POST "+adminapi.BackupPath, func(w http.ResponseWriter, _ *http.Request) {
		out := &backupWriter{w: w, control: http.NewResponseController(w)}
		err := write(out)
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
