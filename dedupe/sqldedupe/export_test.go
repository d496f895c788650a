package sqldedupe

// BySession makes a claim bound its wait as it does on MySQL, on MariaDB too.
func BySession(o Options) Options {
	o.bound = boundBySession
	return o
}
