// Graphile Worker: `setup`, `fill COUNT`, `work`. PGHOST and its sisters name the database, BENCH_DATA is the payload.
// The package is imported by its path (BENCH_MODULE): this file is not below the folder that it is installed in.
import { pathToFileURL } from "node:url";

const { makeWorkerUtils, run, Logger } = await import(pathToFileURL(process.env.BENCH_MODULE));
const concurrentJobs = Number(process.env.BENCH_CONCURRENCY);
const preset = {
  worker: {
    concurrentJobs,
    maxPoolSize: concurrentJobs + 2,
    // Batched, with the sizes that its page on performance measures with.
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger: new Logger(() => (level, message) => {
      if (level === "error" || level === "warning") console.error(message);
    }),
  },
};
const [step, count] = process.argv.slice(2);

if (step === "work") {
  const runner = await run({ preset, taskList: { work: () => {} } });
  await runner.promise;
} else {
  const utils = await makeWorkerUtils({ preset });
  if (step === "setup") await utils.migrate();
  if (step === "fill") {
    const payload = JSON.parse(process.env.BENCH_DATA);
    await utils.addJobs(Array.from({ length: Number(count) }, () => ({ identifier: "work", payload })));
  }
  await utils.release();
}
