package kvasir

import (
	"net"
	"strconv"
	"strings"
)

// sockaddr_un holds 104 bytes on macOS and 108 on Linux, with the NUL; one limit for both.
const maxSocketPathBytes = 100

// parseAddress checks an address, and tells whether no other machine can be behind it.
func parseAddress(text string) (isLoopback bool, err error) {
	if path, isSocket := strings.CutPrefix(text, "unix:"); isSocket {
		return true, checkSocketPath(path)
	}
	host, port, splitError := net.SplitHostPort(text)
	if number, numberError := strconv.ParseUint(port, 10, 16); splitError != nil || numberError != nil || number == 0 || host == "" || strings.Contains(host, "/") {
		return false, invalid("address", "%q: expected unix:/path, host:port or [v6 address]:port", text)
	}
	if ip := net.ParseIP(host); ip != nil {
		return ip.IsLoopback(), nil
	}
	return host == "localhost", nil
}

func checkSocketPath(path string) error {
	switch {
	case !strings.HasPrefix(path, "/") || strings.Contains(path, "\x00"):
		return invalid("address", "unix:%q: expected an absolute path", path)
	case strings.Contains(path, "%"):
		return invalid("address", "unix:%s: a socket's path may have no %%", path)
	case len(path) > maxSocketPathBytes:
		return invalid("address", "unix:%s: %d bytes; a socket may have %d", path, len(path), maxSocketPathBytes)
	}
	return nil
}
